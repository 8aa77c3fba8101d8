"""Key/value caches in training: a recomputed block adds to the cache that its first run was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from tests.engine.harness import (
    CKPT,
    CKPT_SWAP,
    NONE,
    Batch,
    Loop,
    Spec,
    adamw,
    check_equal_to_plain,
    wrap_under,
)

transformers = pytest.importorskip("transformers")

SPECS = tuple(Spec("none", "least", (mode,), attention=mode is CKPT_SWAP) for mode in (CKPT, CKPT_SWAP, NONE))
Model = Callable[..., nn.Module]
MakeBatch = Callable[..., Batch]


def with_cache(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, use_cache=True).loss
    return loss


def with_past(model: nn.Module, batch: Batch) -> Tensor:
    """The second half of the text, after what the first half left in the cache, with gradients through that too."""
    halves = ({name: value.chunk(2, dim=1)[half].contiguous() for name, value in batch.items()} for half in (0, 1))
    first, second = halves
    output: Any = model(**first, use_cache=True)
    loss: Tensor = model(**second, past_key_values=output.past_key_values).loss
    return loss + output.loss


@pytest.mark.parametrize(
    ("family", "loss"), [("gpt2", with_past), ("llama", with_cache), ("t5", with_cache), ("t5", with_past)]
)
def test_caches_grow_once(
    tiny_model: Model,
    tiny_batch: MakeBatch,
    family: str,
    loss: Callable[[nn.Module, Batch], Tensor],
    device: torch.device,
) -> None:
    batches = [tiny_batch(seed) for seed in range(2)]
    check_equal_to_plain(lambda: tiny_model(family), batches, loop=Loop(loss=loss), device=device, specs=SPECS)


def test_caches_that_are_written_to_are_refused(tiny_model: Model, tiny_batch: MakeBatch) -> None:
    model, batch = tiny_model("llama"), tiny_batch()
    wrapped: Any = wrap_under(SPECS[0], model, adamw(model), batch, device=torch.device("cpu"))[0]
    cache = transformers.StaticCache(config=wrapped.config, max_cache_len=32)
    with pytest.raises(MisuseError, match=r"layers\.0 was given a key/value cache whose tensors were written to since"):
        wrapped(**batch, past_key_values=cache)
