"""A model that mixes its weights with tensors in fp32, such as a buffer or noise that its forward makes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protrain
from tests.engine.harness import adamw, assert_same, states

WIDTH = 32


class Mixed(nn.Module):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift + torch.ones(WIDTH)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x.float().square().mean()


def rows() -> list[Tensor]:
    return list(torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float32))


@pytest.mark.parametrize("at", ["wrap", "the first call"])
def test_without_autocast_the_error_says_what_to_do(at: str) -> None:
    def first_step() -> None:
        model: nn.Module = Mixed()
        example = (rows()[0],) if at == "wrap" else None
        model, _ = protrain.wrap(
            model, adamw(model), example_batch=example, device="cpu", dtype="bfloat16", progress=False
        )
        model(rows()[0])

    with pytest.raises(RuntimeError, match="dtype") as caught:  # torch's own
        first_step()
    notes = " ".join(caught.value.__notes__)
    assert "parameters become bfloat16" in notes
    assert "torch.autocast of that type" in notes
    assert 'dtype="float32"' in notes


def test_under_autocast_it_trains_to_the_same_bits_under_each_plan() -> None:
    outcomes = []
    for memory in ("60KiB", "64MiB"):
        model: nn.Module = Mixed()
        model, optimizer = protrain.wrap(
            model, adamw(model), device="cpu", device_memory=memory, dtype="bfloat16", progress=False
        )
        losses = []
        for x in rows():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        outcomes.append((losses, states(model, optimizer), optimizer.plan.n_persist))
    (tight, left, some), (ample, right, every) = outcomes
    assert tight == ample
    assert tight[-1] < tight[0]
    assert some < every
    assert_same(left, right)


def test_another_default_dtype_of_torch_changes_nothing() -> None:
    outcomes = []
    for default in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        torch.set_default_dtype(default)
        try:
            model, optimizer = protrain.wrap(model, adamw(model), device="cpu", dtype="bfloat16", progress=False)
            for x in rows():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            state = optimizer.full_state_dict()["state"]
            outcomes.append(states(model, optimizer) | {f"step {at}": each["step"] for at, each in state.items()})
        finally:
            torch.set_default_dtype(torch.float32)
    assert_same(*outcomes)
