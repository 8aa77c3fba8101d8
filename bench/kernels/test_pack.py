"""A block's saved activations into one buffer, in GPU memory.

Bytes count each storage once, for every implementation: views of one storage have to move once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from bench.kernels.peers import installed
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import DEVICE
from bench.kernels.rows import EAGER, OURS
from protrain.cli.shapes import at_depth
from protrain.common.parameters import same_bytes
from protrain_kernels import pack, unpack

SHAPES = ("gpt2-10b", "llama2-13b")
FOREACH = "torch._foreach_copy_"


@pytest.mark.parametrize("implementation", [OURS, EAGER, FOREACH])
@pytest.mark.parametrize("shape", SHAPES)
def test_pack(recorder: Recorder, shape: str, implementation: str) -> None:
    tensors = saved_activations(shape, recorder.device, whole=recorder.timed)
    run: Callable[[], object] = partial(pack, tensors) if implementation == OURS else _copies(tensors, implementation)

    def check() -> str:
        found = unpack(pack(tensors)) if implementation == OURS else run()
        assert isinstance(found, list)
        return _expect_same(found, tensors, layouts=implementation == OURS)

    recorder.measure(
        operator="pack",
        shape=f"{shape} block's activations",
        dtype="mixed",
        implementation=implementation,
        roof=DEVICE,
        bytes_moved=2 * pack(tensors).buffer.nbytes,
        run=run,
        check=check,
    )


def saved_activations(name: str, device: torch.device, *, whole: bool) -> list[Tensor]:
    """What autograd saves in the forward of a model ``name`` of one block and no head, bf16, without the weights.

    Args:
        name: of a shape.
        device: where the model runs.
        whole: 4 sequences of 1024 through a block of the shape's sizes; else a small block of the same structure.
    """
    transformers, _ = installed("transformers", "transformers")
    shape = at_depth(name, 1)
    if not whole:
        shape |= {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 64}
    config = transformers.AutoConfig.for_model(**shape)
    config.use_cache = False
    if config.model_type == "gpt2":
        config.resid_pdrop = 0.1  # whose masks are of another type
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModel.from_config(config).to(torch.bfloat16).train()
        ids = torch.randint(config.vocab_size, (4, 1024) if whole else (2, 12))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        # Random states of attention may lie on the host, and weights are no activations.
        if tensor.device.type == device.type and tensor.untyped_storage().data_ptr() not in weights:
            saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids)
    return saved


def _copies(tensors: list[Tensor], name: str) -> Callable[[], list[Tensor]]:
    """Every tensor copied into memory of its own: what packing comes to without a kernel for it."""
    targets = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]

    def each() -> list[Tensor]:
        for tensor, target in zip(tensors, targets, strict=True):
            target.copy_(tensor)
        return targets

    def all_at_once() -> list[Tensor]:
        torch._foreach_copy_(targets, tensors)
        return targets

    return all_at_once if name == FOREACH else each


def _expect_same(found: list[Tensor], wanted: list[Tensor], *, layouts: bool) -> str:
    """``layouts``: with strides, which a peer needn't keep."""
    assert len(found) == len(wanted), f"{len(found)} tensors came back, not {len(wanted)}"
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert same_bytes(one, other.to(one.device)), f"tensor {index}: its bytes differ"
        assert not layouts or one.stride() == other.stride(), f"tensor {index}: stride {one.stride()}"
    return "bytes and strides equal" if layouts else "bytes equal"
