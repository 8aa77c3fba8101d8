"""Attention kept while the rest of a block is recomputed: it runs once, and every bit stays what it was."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from protrain.forward.dispatch import is_attention
from tests.engine import residual
from tests.engine.harness import Batch, Spec, adamw, check_equal_to_plain, default_loss, generate_no_code, wrap_under

HEADS, HEAD_SIZE, SEQUENCE, DEPTH = 2, 16, 32, 3
WIDTH = HEADS * HEAD_SIZE
KEEPING = (
    Spec("all", "least", "c", attention=True),
    Spec("none", "least", "i", small=True, attention=True),
    Spec("some", "least", "isn", attention=True),
)


class Calls(TorchDispatchMode):
    """Counts attention that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += is_attention(func)
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Attention ``repeats`` times, each on what the one before put out, between an input and an output.

    What attention puts out may be written over where it has no backward ("frozen"), or one that nothing comes to
    ("detached").
    """

    def __init__(self, *, repeats: int = 1, dropout: float = 0.0, writes: str = "") -> None:
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.repeats, self.dropout, self.writes = repeats, dropout, writes

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        if self.writes == "frozen":
            heads = heads.detach()
        query, key, value = heads.unbind(0)
        for _ in range(self.repeats):
            query = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            if self.writes:
                query = query.detach().mul_(0.5)
        return x + F.dropout(self.out(query.transpose(1, 2).flatten(2)), self.dropout)


def make(**options: Any) -> nn.Module:
    return residual.make(WIDTH, DEPTH, lambda _: Block(**options))


def rows(count: int) -> list[Batch]:
    return residual.batches(count, (2, SEQUENCE, 8))


def computed(model: nn.Module, batch: Batch) -> int:
    """Attention that one forward and backward compute."""
    with Calls() as calls:
        default_loss(model, batch).backward()
    return calls.count


@pytest.mark.parametrize("compile", [False, True])
def test_attention_runs_once(monkeypatch: pytest.MonkeyPatch, device: torch.device, compile: bool) -> None:
    if device.type == "cpu":
        generate_no_code(monkeypatch)
    torch._dynamo.reset()
    found = {}
    for modes in "cin":
        for attention in (False, True):
            model = make(repeats=2)
            spec = Spec("none", "least", modes, attention=attention)
            wrapped, optimizer = wrap_under(
                spec, model, adamw(model), rows(1)[0], device=device, dtype=torch.bfloat16, compile=compile
            )
            assert optimizer.plan.keep_attention == attention
            found[modes, attention] = computed(wrapped, rows(1)[0])
    torch._dynamo.reset()
    twice, once = 2 * 2 * DEPTH, 2 * DEPTH
    modes_found = {name: [found[name, False], found[name, True]] for name in "cin"}
    assert modes_found == {"c": [twice, once], "i": [twice, once], "n": [once, once]}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"repeats": 3}),
        (torch.float32, {"repeats": 2, "dropout": 0.2}),
        (torch.bfloat16, {"dropout": 0.2}),
        (torch.bfloat16, {"writes": "frozen"}),
        (torch.float32, {"writes": "detached"}),
    ],
    ids=str,
)
def test_bits_are_those_of_the_plain_loop(device: torch.device, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check_equal_to_plain(functools.partial(make, **options), rows(2), device=device, dtype=dtype, specs=KEEPING)
