"""A process that is forked after ``wrap`` has no states. It says so, and the training goes on as if there were none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain

WORDS = "this process was forked from the one that called protrain.wrap, and has no model states"
BATCH = torch.linspace(-1.0, 1.0, 64).view(4, 16)


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(BATCH).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrapped(**limits: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return protrain.wrap(model, optimizer, example_batch=(BATCH,), device="cpu", progress=False, **limits)


def in_child(action: Callable[[], Any]) -> str:
    """What ``action`` raised in a forked process, or why that ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return said or f"status {os.waitstatus_to_exitcode(status)}"


@pytest.mark.parametrize("limits", [{}, {"device_memory": "12KiB"}], ids=["on the device", "offloaded"])
def test_a_forked_process_says_what_it_lacks(limits: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = wrapped(**limits)
    losses = train(model, optimizer, 1)
    assert (optimizer.plan.n_persist == optimizer.plan.n_chunks) == (not limits)
    for action in (
        lambda: train(model, optimizer, 1),
        lambda: model.eval()(BATCH),
        lambda: model.state_dict(),
        lambda: next(model.parameters()).sum(),
        lambda: optimizer.state_dict(),
        lambda: protrain.save_checkpoint(tmp_path, model, optimizer),
    ):
        assert in_child(action).startswith(f"MisuseError: {WORDS}")
    losses += train(model, optimizer, 2)
    assert losses == train(*wrapped(), 3)
