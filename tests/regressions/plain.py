"""What the scripts of this folder share: a small model, the plain loop that gives right values, and plans.

A script ``script(model, optimizer)`` runs on a plain model and on a wrapped one: its values and all that it leaves must
have the same bits. It uses public names of protrain alone, so it says what users see, whatever the engine is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

import protrain
from protrain_kernels import adam_reference, adam_scalars, sum_of_squares_reference
from tests.engine.harness import adamw

ON_DEVICE, OFFLOADED = "on the device", "offloaded"
both_plans = pytest.mark.parametrize("plan", [ON_DEVICE, OFFLOADED])
WIDTH = 16
Make = Callable[[], nn.Module]
Script = Callable[[Any, Any], Any]
_plans: dict[str, protrain.Plan] = {}  # that wrap has found, by model and options


class Blocks(nn.Module):
    """Residual blocks, made by ``block()``, which returns any module from WIDTH features to WIDTH features."""

    def __init__(self, block: Make | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)

        def usual() -> nn.Module:
            return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

        self.blocks = nn.ModuleList((block or usual)() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def rows(seed: int = 0, count: int = 4) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


class Plain(torch.optim.AdamW):
    """The optimizer of the plain loop: torch's AdamW with the reference operators of ``protrain_kernels``.

    Two ranks train with the mean of their gradients.
    """

    factor: Tensor | None = None  # what clipping multiplies gradients with
    is_reduced = False  # whether gradients are the mean of all ranks

    def reduce(self) -> None:
        if dist.is_initialized() and not self.is_reduced:
            for p in [p for each in self.param_groups for p in each["params"] if p.grad is not None]:
                dist.all_reduce(p.grad)
                p.grad.mul_(0.5)
        self.is_reduced = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.reduce()
        for p, group in [(p, each) for each in self.param_groups for p in each["params"] if p.grad is not None]:
            if not self.state[p]:
                self.state[p].update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state, (beta1, beta2) = self.state[p], group["betas"]
            state["step"] += 1
            given = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            scalars = adam_scalars(beta1=beta1, beta2=beta2, step=int(state["step"]), decoupled=True, **given)
            adam_reference(p, None, state["exp_avg"], state["exp_avg_sq"], p.grad, scalars, scale=self.factor)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        self.reduce()
        every = [p.grad.reshape(-1) for each in self.param_groups for p in each["params"] if p.grad is not None]
        norm = torch.cat([sum_of_squares_reference(gradient) for gradient in every]).double().sum().sqrt().float()
        self.factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.factor, self.is_reduced = None, False


def plain(make: Make = Blocks) -> tuple[nn.Module, Plain]:
    model = make().train()
    return model, Plain(adamw(model).param_groups)


def offloaded(plan: protrain.Plan) -> protrain.Plan:
    """Nothing stays on the device, and every block is recomputed."""
    modes = tuple(type(mode)("ckpt") for mode in plan.block_modes)
    counts = ["n_persist", "n_swap", "n_ckpt_swap", "n_speculate", "n_weight_only", "n_device_sum"]
    changes: dict[str, Any] = {**dict.fromkeys(counts, 0), "n_ckpt": len(modes), "block_modes": modes}
    return replace(plan, stream=False, keep_attention=False, **changes)


def wrapped(plan: str, /, make: Make = Blocks, batch: Any = None, n_buffer: int = 2, **options: Any) -> tuple[Any, Any]:
    """``protrain.wrap`` on the CPU. With ``late=True`` the first call of the model begins the training."""
    late, given, batch = options.pop("late", False), options.pop("plans", {}), rows() if batch is None else batch
    options = {"device": "cpu", "device_memory": "4GiB", "host_memory": "4GiB", "progress": False, **options}
    if plan == OFFLOADED:
        like = f"{(model := make())} {[p.requires_grad for p in model.parameters()]} {options}"
        if like not in _plans:
            _plans[like] = protrain.wrap(model, adamw(model), example_batch=batch, **options)[1].plan
        options["plan"] = replace(offloaded(_plans[like]), n_buffer=n_buffer, **given)
    model = make()
    model, optimizer = protrain.wrap(model, adamw(model), example_batch=None if late else batch, **options)
    if not late:
        assert optimizer.plan.n_persist == (0 if plan == OFFLOADED else optimizer.plan.n_chunks)
    return model, optimizer


def step(optimizer: Any, loss: Tensor, look: Callable[[], Any] = lambda: None) -> float:
    """A step, in which the script may ``look`` at something between backward and update. Returns the loss."""
    loss.backward()
    look()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(model: nn.Module, optimizer: Any, steps: int = 2, seed: int = 0) -> list[float]:
    """The usual loop, clipped. Returns losses and norms."""
    values = []
    for step in range(steps):
        loss = model(rows(seed + step)).square().mean()
        loss.backward()
        values += [loss.item(), optimizer.clip_grad_norm_(0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return values


def whole(model: Any, optimizer: Any) -> AbstractContextManager[Any]:
    """Where a script may read and write all weights."""
    return nullcontext() if isinstance(optimizer, Plain) else protrain.full_parameters(model)


def left(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All weights, buffers and states, as copies."""
    states = {"weights": model.state_dict(), "states": optimizer.state_dict()["state"]}
    return {name: value.clone() for name, value in leaves(states).items()}


def leaves(tree: Any) -> dict[str, Tensor]:
    return {keystr(path): torch.as_tensor(leaf).detach() for path, leaf in tree_leaves_with_path(tree)}


def assert_same(found: Any, expected: Any) -> None:
    """Same names, types and bits."""
    ours, theirs = leaves(found), leaves(expected)
    assert {name: each.dtype for name, each in ours.items()} == {name: each.dtype for name, each in theirs.items()}
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), f"{name}: {ours[name]}, not {value}"


def check(script: Script, plan: str, make: Make = Blocks, **options: Any) -> None:
    """``script`` finds and leaves the same bits under ``plan`` as in the plain loop."""
    found = []
    for model, optimizer in (plain(make), wrapped(plan, make, **options)):
        torch.manual_seed(1)
        found.append((script(model, optimizer), left(model, optimizer)))
    assert_same(found[1], found[0])


def same_bits(make: Make = Blocks, **options: Any) -> Callable[[Script], Callable[[str], None]]:
    """Make a test of the script below, which must find and leave the bits of the plain loop under both plans."""

    def test_of(script: Script) -> Callable[[str], None]:
        @both_plans
        def test(plan: str) -> None:
            check(script, plan, make, **options)

        return test

    return test_of
