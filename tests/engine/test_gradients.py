"""What stands in .grad, and hooks behind it: torch's own clipping and values, or an error that names the remedy."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from protrain.common.errors import MisuseError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import CKPT, FEW_PLANS, NONE, Spec, adamw, assert_same, default_loss, states, wrap_under
from tests.engine.residual import batches, make

OFFLOADED = Spec("none", "least", (CKPT,))
RESIDENT = Spec("all", "least", (NONE,))
Wrapped = tuple[nn.Module, ProTrainOptimizer]
Clip = Callable[[nn.Module, ProTrainOptimizer], Any]


def wrapped_under(spec: Spec, device: torch.device, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Wrapped:
    model = make()
    return wrap_under(spec, model, adamw(model), batches()[0], device=device, dtype=dtype, **options)


def train(wrapped: Wrapped, clip: Clip, *, accumulate: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and final states of a few steps."""
    model, optimizer = wrapped
    torch.manual_seed(1)
    found = []
    for number, batch in enumerate(batches(4), start=1):
        optimizer.backward(default_loss(model, batch))
        if number % accumulate == 0:
            found.append(float(clip(model, optimizer)))
            optimizer.step()
            optimizer.zero_grad()
    return found, states(model, optimizer)


def by_torch(model: nn.Module, optimizer: ProTrainOptimizer) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def by_its_parts(model: nn.Module, optimizer: ProTrainOptimizer) -> Tensor:
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    return norm


def by_loops(model: nn.Module, optimizer: ProTrainOptimizer) -> Tensor:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    factor = torch.clamp(0.05 / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor
    return norm


@functools.cache
def norms_of_clip_grad_norm(device: torch.device, dtype: torch.dtype, accumulate: int) -> list[float]:
    """What the optimizer's own clipping returns in each step."""
    wrapped = wrapped_under(RESIDENT, device, dtype, accumulation=accumulate)
    return train(wrapped, lambda _, optimizer: optimizer.clip_grad_norm_(0.05), accumulate=accumulate)[0]


SUMS_ON_HOST = {"accumulate": 2, "tight": True}


@pytest.mark.parametrize(
    ("clip", "dtype", "options", "specs"),
    [
        (by_torch, torch.bfloat16, {}, FEW_PLANS),
        (by_torch, torch.float32, {"accumulate": 2}, FEW_PLANS[::2]),
        (by_torch, torch.bfloat16, SUMS_ON_HOST, FEW_PLANS[1::2]),
        (by_torch, torch.float16, {}, FEW_PLANS[::2]),
        (by_its_parts, torch.bfloat16, {}, FEW_PLANS[::2]),
        (by_its_parts, torch.bfloat16, SUMS_ON_HOST, FEW_PLANS[1::2]),
        (by_loops, torch.float32, {"accumulate": 2}, FEW_PLANS[1::2]),
        (by_loops, torch.float16, {}, FEW_PLANS[::2]),
    ],
)
def test_torchs_own_clipping_gives_the_same_bits_under_every_plan(
    clip: Clip, dtype: torch.dtype, options: dict[str, Any], specs: tuple[Spec, ...], device: torch.device
) -> None:
    accumulate, tight = options.get("accumulate", 1), options.get("tight", False)
    ours = norms_of_clip_grad_norm(device, dtype, accumulate)
    how: dict[str, Any] = {"tight": tight, "accumulation": accumulate}
    found = [
        train(wrapped_under(spec, device, dtype, **how), clip, accumulate=accumulate) for spec in (RESIDENT, *specs)
    ]
    norms, final = found[0]
    assert norms == pytest.approx(ours, rel=1e-3, nan_ok=True)
    assert max(norms) > 0.1, "nothing was clipped"
    for other, others in found[1:]:
        assert repr(other) == repr(norms)
        assert_same(others, final)


@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_each_norm_is_that_of_the_gradient(spec: Spec, device: torch.device) -> None:
    plain = make().to(device)
    torch.manual_seed(1)
    default_loss(plain, tuple(value.to(device) for value in batches()[0])).backward()
    model, optimizer = wrapped_under(spec, device, torch.float32)
    torch.manual_seed(1)
    default_loss(model, batches()[0]).backward()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        gradient = parameter.grad
        assert gradient is not None
        assert gradient.shape == parameter.shape
        assert gradient.dtype == parameter.dtype
        assert gradient.device == parameter.device
        assert name in repr(gradient)
        norms = [gradient.norm(), gradient.norm(2), torch.norm(gradient), torch.linalg.vector_norm(gradient)]
        norms += [gradient.detach().data.norm(2.0), torch.linalg.norm(gradient)]
        norms += [torch.linalg.norm(gradient, 2 if gradient.dim() == 1 else "fro")]
        for norm in norms:
            torch.testing.assert_close(norm, expected.grad.norm(), rtol=1e-5, atol=1e-8)
        assert torch.linalg.vector_norm(gradient, 2.0, dtype=torch.float64).dtype is torch.float64
    optimizer.clip_grad_norm_(0.01)
    clipped = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(float(clipped.norm()), 0.01, rtol=1e-4, atol=0)
    optimizer.step()


def test_gradients_of_others_are_clipped_with_them(device: torch.device) -> None:
    model, optimizer = wrapped_under(OFFLOADED, device)
    other = nn.Parameter(torch.ones(3, device=device))
    default_loss(model, batches()[0]).backward()
    (other * torch.tensor([3.0, 0.0, 4.0], device=device)).sum().backward()
    alone = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    norm = torch.nn.utils.clip_grad_norm_([*model.parameters(), other], 1.0)
    torch.testing.assert_close(float(norm), (alone**2 + 25) ** 0.5, rtol=1e-5, atol=0)
    assert other.grad is not None
    torch.testing.assert_close(float(other.grad.norm()), 5 / float(norm), rtol=1e-4, atol=0)
    left = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(left, alone / float(norm), rtol=1e-4, atol=0)
    optimizer.step()


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda g: g.zero_(),
    "add": lambda g: g + 1,
    "norm": lambda g: g.norm(1),
    "vector_norm": lambda g: torch.linalg.vector_norm(g, float("inf")),
    "norm of rows": lambda g: g.norm(dim=0),
    "mul_": lambda g: g.mul_(torch.ones(g.shape)),
    "clamp_": lambda g: torch.nn.utils.clip_grad_value_([g], 1.0) or g.clamp_(-1, 1),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "data": lambda g: g.data.zero_(),
    "numbers": lambda g: g.detach().tolist(),
    "array": lambda g: g.detach().numpy(),
    "clone": lambda g: g.clone(),
    "item": lambda g: g.flatten()[0].item(),
    "copy": copy.deepcopy,
    "norm of a matrix": lambda g: torch.linalg.norm(g, 2 if g.dim() == 2 else "fro"),
    "factors": lambda g: torch._foreach_mul_([g], [0.5]),
    "foreach": lambda g: torch._foreach_add_([g], 1.0),
    "foreach norm": lambda g: torch._foreach_norm([g], float("inf")),
    "unscale": lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(1), torch.ones(1)),
}


def test_anything_else_names_the_parameter_and_the_remedy(device: torch.device) -> None:
    model, optimizer = wrapped_under(OFFLOADED, device)
    default_loss(model, batches()[0]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for operation, operate in OPERATIONS.items():
            with pytest.raises(MisuseError) as raised:
                operate(parameter.grad)
            words = rf"gradient of {name} is kept.*optimizer\.zero_grad\(\)"
            assert re.search(words, str(raised.value)), operation
    optimizer.step()


def test_a_gradient_that_is_used_up_has_no_norm(device: torch.device) -> None:
    model, optimizer = wrapped_under(OFFLOADED, device)
    parameter = next(model.parameters())
    default_loss(model, batches()[0]).backward()
    gradient = parameter.grad
    assert gradient is not None
    optimizer.step()
    optimizer.zero_grad()
    assert parameter.grad is None
    for use in (gradient.norm, lambda: gradient.mul_(0.5)):
        with pytest.raises(MisuseError, match=r"without the gradient of .*: call loss\.backward\(\) first"):
            use()
    with pytest.raises(MisuseError, match="cannot be assigned"):
        parameter.grad = gradient


@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_all_gradients_are_set_to_none(spec: Spec, device: torch.device) -> None:
    """A backward that counts for nothing, though it was clipped."""

    def run(clear: Callable[[nn.Module, ProTrainOptimizer], Any]) -> dict[str, Tensor]:
        model, optimizer = wrapped_under(spec, device)
        torch.manual_seed(1)
        for batch in batches(2):
            default_loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            clear(model, optimizer)
            default_loss(model, batch).backward()
            optimizer.step()
            clear(model, optimizer)
            assert all(parameter.grad is None for parameter in model.parameters())
        return states(model, optimizer)

    def set_to_none(model: nn.Module, optimizer: ProTrainOptimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    assert_same(run(set_to_none), run(lambda _, optimizer: optimizer.zero_grad()))


# -- hooks of register_post_accumulate_grad_hook -----------------------------------------------------------------------

CPU = torch.device("cpu")
SPECS = (Spec("all", "least", (NONE,)), *FEW_PLANS[:2])
ALL_SPECS = pytest.mark.parametrize("spec", SPECS, ids=str)
FIRST = "enter.weight"  # whose gradient comes last
REFUSED = f"^{FIRST} has a hook .*register_post_accumulate_grad_hook.*earlier backward.*in a tensor hook"


def in_fp32(spec: Spec, device: torch.device = CPU, **options: Any) -> tuple[Any, ProTrainOptimizer]:
    model = make()
    return wrap_under(spec, model, adamw(model), batches()[0], device=device, **options)


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


def backward(model: nn.Module, place: int) -> None:
    """The backward of a loss of one of the batches."""
    torch.manual_seed(place)
    (batch,) = batches()[place]
    default_loss(model, (batch.to(next(model.parameters()).device),)).backward()


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]], ids=str)
def test_updates_inside_backward_are_not_begun(spec: Spec, device: torch.device) -> None:
    model, optimizer = in_fp32(spec, device, accumulation=2, step_during_backward=True)
    model.get_parameter(FIRST).register_post_accumulate_grad_hook(clamp)
    before = states(model, optimizer)
    with model.no_sync():
        backward(model, 0)
    with pytest.raises(MisuseError, match=REFUSED):
        backward(model, 1)
    assert_same(states(model, optimizer), before)


class Shared(nn.Module):
    """Blocks that use one weight."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        for block in self.blocks:
            block.get_submodule("0").weight = self.blocks[0].get_parameter("0.weight")
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return self.leave(x)


@pytest.mark.parametrize("writes", [False, True])
@ALL_SPECS
def test_sums_inside_one_backward_are_refused_where_the_hook_wants_them(spec: Spec, writes: bool) -> None:
    """A reentrant checkpoint is a backward inside the backward: torch calls the hook after each."""
    model = Shared()
    trained, _ = wrap_under(spec, model, adamw(model), batches()[0], device=CPU)
    model.reentrant, name, calls = True, "blocks.0.0.weight", []

    def hook(parameter: Tensor) -> None:
        calls.append(parameter)
        if writes:
            parameter.grad = torch.zeros_like(parameter)
        else:
            clamp(parameter)

    trained.get_parameter(name).register_post_accumulate_grad_hook(hook)
    with pytest.raises(MisuseError, match=f"^{name} has a hook"):
        backward(trained, 0)
    assert len(calls) == 2
