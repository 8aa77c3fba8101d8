"""Predicted peaks of models that do more between blocks than hand a tensor on: never far from the true ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.batch import loss_of
from tests.engine.harness import CKPT, CKPT_SWAP, NONE, SWAP, Spec, adamw, wrap_under
from tests.engine.true_memory import peak_of_second_step

CPU = torch.device("cpu")


def planned_to_true(
    model: nn.Module, x: Tensor, modes: Any, loss: Callable[[Any], Tensor] = loss_of, *, packed: bool = False
) -> float:
    """The planned device memory by that of a step."""
    spec = Spec("none", "least", modes, packed=packed)
    model, optimizer = wrap_under(spec, model, adamw(model), (x,), device=CPU)
    return optimizer.plan.device_bytes / peak_of_second_step(optimizer, lambda: model(x), [x], loss=loss)


class _Outputs(nn.Module):
    """A unit with an output of every weight: all gradients arrive before backward leaves it."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(16):
            self.register_parameter(f"weight{index}", nn.Parameter(torch.randn(64, 64) * 0.1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x @ weight for weight in self.parameters())


class _OneUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = _Outputs()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([output.square().mean() for output in self.unit(x)]).sum()


class _TwoUnits(nn.Module):
    """Side by side, both in one loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = _Outputs(), _Outputs()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(a * b).mean() for a, b in zip(self.one(x), self.other(x), strict=True)]).sum()


@pytest.mark.parametrize("make", [_OneUnit, _TwoUnits])
def test_gradients_of_a_unit_with_several_outputs_are_held_together(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert 1.0 <= planned_to_true(make(), torch.randn(4, 64), (NONE,)) <= 1.02


class _Probed(nn.Module):
    """Behind the blocks a unit that is called without gradients, and then something large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))) for _ in range(3))
        self.probe = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            self.probe(x)
            large = torch.cat([x] * 64, 1).square().mean()
        return x.square().mean() + 0 * large


@pytest.mark.parametrize("packed", [False, True])
def test_a_unit_without_gradients_ends_nothing_of_a_swapped_block(packed: bool) -> None:
    torch.manual_seed(0)
    assert 1.0 <= planned_to_true(_Probed(), torch.randn(256, 64), (CKPT, CKPT, SWAP), packed=packed) <= 1.02


class _InDoubles(nn.Module):
    """Saves nothing of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(64, 8)

    def forward(self, x: Tensor | tuple[Tensor]) -> Tensor:
        [x] = [x] if isinstance(x, Tensor) else x
        return x + self.down(x.double().tanh().float()).sum(-1, keepdim=True)


class _Words(nn.Module):
    """Returns logits of a large vocabulary and the loss that it makes of them, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4))
        self.head = nn.Linear(64, 1024)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        targets = torch.arange(len(x)) % 1024
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits, targets)


@pytest.mark.parametrize("modes", [(NONE,), (CKPT,)], ids=lambda modes: modes[0].value)
def test_logits_beside_a_loss_are_there_and_nothing_is_made_of_them(modes: Any) -> None:
    torch.manual_seed(0)
    assert 1.0 <= planned_to_true(_Words(), torch.randn(512, 64), modes, lambda output: output[1]) <= 1.03


class _Collecting(nn.Module):
    """Holds what its blocks are given until it returns, or until all blocks are done, and then makes something large.

    A third of the blocks is given its input by name, another one in a tuple.
    """

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_InDoubles() for _ in range(6))
        self.head = nn.Linear(64, 8)
        self.keep = keep

    def forward(self, x: Tensor) -> dict[str, Any]:
        states = []
        for index, layer in enumerate(self.layers):
            if self.keep:
                states.append(x)
            args, kwargs = [((x,), {}), ((), {"x": x}), (((x,),), {})][index % 3]
            x = layer(*args, **kwargs)
        if self.keep == "for a while":
            states.clear()
        y = self.head(x).square().mean()
        with torch.no_grad():
            large = torch.cat([x] * 32, 1).square().mean()
        return {"loss": x.square().mean() + y + 0 * large, "states": states}


@pytest.mark.parametrize(
    ("modes", "packed"),
    [((NONE,), False), ((SWAP,), False), ((SWAP,), True), ((CKPT_SWAP,), False), ((CKPT,), False)],
    ids=str,
)
@pytest.mark.parametrize("keep", ["until the end", "for a while", ""])
def test_inputs_that_the_model_holds_are_in_the_plan_for_as_long(keep: str, modes: Any, packed: bool) -> None:
    torch.manual_seed(0)
    assert 1.0 <= planned_to_true(_Collecting(keep), torch.randn(256, 64), modes, packed=packed) <= 1.03


class _OfWhatStays(nn.Module):
    """Saves tensors that a swapped block leaves on the device: small ones, conjugate views or negative ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 32)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.kind == "small":
            for index in range(40):
                h = h + (h.detach().mean(-1) * index).tanh().exp().unsqueeze(-1) * self.outer.bias.sum().tanh()
            return x + torch.stack([row * row.tanh() for row in self.outer(h)])
        f = torch.fft.rfft(h)
        if self.kind == "conjugate":
            return x + self.outer(torch.fft.irfft(f * f.conj() * torch.exp(1j * f.angle().detach()), n=32))
        imaginary = f.conj().imag
        return x + self.outer(nn.functional.pad(imaginary * imaginary.sigmoid(), (0, 32 - imaginary.shape[-1])))


@pytest.mark.parametrize(
    ("modes", "packed"), [((SWAP,), False), ((SWAP,), True), ((SWAP, CKPT_SWAP, CKPT, NONE), False)]
)
@pytest.mark.parametrize("kind", ["small", "conjugate", "negative"])
def test_what_stays_of_a_swapped_block_is_in_the_plan(kind: str, modes: Any, packed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(*(_OfWhatStays(kind) for _ in range(4))), nn.Linear(32, 3))
    assert planned_to_true(model, torch.randn(64, 32), modes, packed=packed) >= 1.0
