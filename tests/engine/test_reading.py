"""Parameters read outside the forward that uses them: the values of the plain model under every plan, never a write."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import protrain
from protrain.common.errors import MisuseError
from tests.engine.harness import (
    CKPT,
    NONE,
    SWAP,
    Loop,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    default_loss,
    plain_run,
    seeded,
    states,
    wrap_under,
)
from tests.engine.residual import batches, make

RESIDENT = Spec("all", "least", (NONE,))
SPECS = (
    RESIDENT,
    Spec("some", "least", (CKPT, SWAP, NONE), speculate=True),
    Spec("none", "least", (NONE, CKPT), small=True, speculate=True, weights=True),
    Spec("none", "least", (CKPT,), stream=True),
)
NAME = "blocks.1.first.weight"

READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "product": lambda p: p * 2,
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data,
    "row": lambda p: p[1],
    "transposed": lambda p: p.t().contiguous(),
    "list": lambda p: p.tolist(),
    "largest of each row": lambda p: p.max(dim=1).values,
    "among others": lambda p: torch.stack([torch.zeros_like(p), p]),
    "linear": lambda p: F.linear(torch.ones(2, p.shape[1], dtype=p.dtype, device=p.device), p),
    "numpy": lambda p: p.detach().cpu().numpy().copy(),
    "average": lambda p: torch.zeros_like(p).lerp_(p.detach(), 0.25),
    "strides": lambda p: (p.stride(), p.is_contiguous(), p.storage_offset() >= 0),
    "inference": lambda p: torch.inference_mode()(lambda: p.sum().item())(),
    "zeros": lambda p: p.new_zeros(3),
    "ones like it": lambda p: torch.ones_like(p),
    "as large": lambda p: torch.ones(1, device=p.device).expand_as(p).sum(),
    "of its type": lambda p: torch.ones(2, dtype=torch.float64).to(p),
    "of its own type": lambda p: [p.to(p).tolist(), p.type_as(p).tolist()],
    "of its own shape": lambda p: [p.view_as(p).tolist(), p.expand_as(p).tolist(), p.reshape_as(p).tolist()],
}


def _comparable(value: Any) -> Any:
    return value.detach().cpu().tolist() if isinstance(value, Tensor) else getattr(value, "tolist", lambda: value)()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_parameter_reads_as_the_plain_models(spec: Spec, device: torch.device) -> None:
    data, model = batches(1), make()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device)
    Loop().run(wrapped, optimizer, data)
    parameter, plain = wrapped.get_parameter(NAME), nn.Parameter(wrapped.state_dict()[NAME].to(device))
    for name, read in READS.items():
        assert _comparable(read(parameter)) == _comparable(read(plain)), name


def _penalty(model: nn.Module, *, late_s: float = 0.0) -> Tensor:
    """A term of the loss that is made of weights: their squares, and how far a matrix is from orthogonal.

    In backward the gradient of the latter comes ``late_s`` seconds late.
    """
    matrix = model.get_parameter(NAME)
    gram = matrix.t() @ matrix
    if late_s:
        gram.register_hook(lambda _: time.sleep(late_s))
    total = (gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).square().mean()
    for parameter in model.parameters():
        total = total + parameter.pow(2).sum() * 1e-3
    return total


def _with_penalty(model: nn.Module, batch: Any) -> Tensor:
    return default_loss(model, batch) + _penalty(model)


def test_a_loss_made_inside_full_parameters_has_the_plain_loops_bits(device: torch.device) -> None:
    def loss(model: nn.Module, batch: Any, *, late_s: float) -> Tensor:
        first = default_loss(model, batch)
        with protrain.full_parameters(model):
            penalty = _penalty(model, late_s=late_s)
        return first + penalty.to(first.device)

    data, found = batches(2), []
    for spec, late_s in zip(SPECS, (0.0, 0.2, 0.0, 0.2), strict=True):  # another thread runs the GPU's backward
        model, loop = make(), Loop(loss=functools.partial(loss, late_s=late_s))
        wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device)
        found.append((loop.run(wrapped, optimizer, data), states(wrapped, optimizer)))
    expected, final = plain_run(make, data, loop=Loop(loss=_with_penalty), device=device, dtype=torch.float32)
    for losses, state in found:
        assert losses == found[0][0]
        assert_same(state, found[0][1])
    if device.type == "cpu":
        assert found[0][0] == expected
        assert_same(found[0][1], final)
    else:  # the term is computed on the CPU, whose sums are not the GPU's to the last bit
        assert found[0][0] == pytest.approx(expected, rel=1e-3)


def test_views_of_what_was_read_are_read_only_and_end_with_the_step(device: torch.device) -> None:
    for spec in SPECS:
        model = make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=device)
        parameter = wrapped.get_parameter(NAME)
        view = parameter.detach()[1:]
        kept = parameter.detach().clone()
        kept.mul_(2.0)  # the script's own
        assert torch.equal(kept[1:], view * 2)
        with pytest.raises(MisuseError, match=rf"data of {NAME} was changed in place"):
            view[0].zero_()
        with pytest.raises(MisuseError, match=rf"memory of {NAME} cannot be read .*untyped_storage"):
            parameter.untyped_storage()
        loss = _with_penalty(wrapped, batches()[0])
        late = (parameter * 2).sum()
        loss.backward()
        optimizer.step()
        with pytest.raises(MisuseError, match=rf"a copy of {NAME} after optimizer.step\(\)"):
            view.sum()
        with pytest.raises(MisuseError, match=rf"backward through a copy of {NAME} after optimizer.step\(\)"):
            late.backward()


def test_tied_parameters_are_told_by_their_address(device: torch.device) -> None:
    for spec in SPECS:
        model = make()
        wrapped, _ = wrap_under(spec, model, adamw(model), batches()[0], device=device)
        addresses = [parameter.data_ptr() for parameter in wrapped.parameters()]
        assert 0 not in addresses
        assert len(set(addresses)) == len(addresses)


# -- data that forward replaces ----------------------------------------------------------------------------------------


class Restored(nn.Module):
    """A layer that gives its weight other storage in its own forward, past Python, as recurrent modules on a GPU do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        raw: Any = Tensor.data
        raw.__set__(self.weight, self.weight.detach() * self.factor)
        return torch.tanh(x @ self.weight)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_other_storage_does_no_harm_and_other_values_in_it_are_refused(spec: Spec, device: torch.device) -> None:
    with seeded():
        inner = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(Restored() for _ in range(3))))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model, optimizer = wrap_under(spec, inner, adamw(inner), (x,), device=device)
    losses = Loop().run(model, optimizer, [(x,)] * 3)
    assert losses == sorted(losses, reverse=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layer: Any = model.get_submodule("1.1")
    layer.factor = 2.0
    with pytest.raises(MisuseError, match=r"data of 1\.1\.weight was replaced .*never in a forward"):
        model(x)
    layer.factor = 1.0
    model(x)
    assert_same(dict(model.state_dict()), before)


class FusedHead(nn.Module):
    """A model whose forward a trainer replaces by one that uses the head's weight and does not call the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 64, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(ids)).flatten(0, 1), ids.flatten())


def test_a_forward_that_was_replaced_may_use_weights_of_modules_that_it_does_not_call(device: torch.device) -> None:
    def fused(model: Any, ids: Tensor) -> Tensor:
        weight, losses = model.head.weight, []
        for hidden, wanted in zip(model.hidden(ids).flatten(0, 1).split(8), ids.flatten().split(8), strict=True):
            losses.append(F.cross_entropy(hidden @ weight.t(), wanted, reduction="sum"))
        return torch.stack(losses).sum() / ids.numel()

    def build() -> nn.Module:
        with seeded():
            return FusedHead()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        model.forward = functools.partial(fused, model)
        return model(*batch)

    ids = [(torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(seed)),) for seed in range(2)]
    check_equal_to_plain(build, ids, device=device, loop=Loop(loss=loss), specs=SPECS)
