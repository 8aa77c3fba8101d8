"""What backward needs must not be changed in place, and no view of a weight outlives its forward: both are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from tests.engine import residual
from tests.engine.harness import Loop, Spec, adamw, check_equal_to_plain, unharmed, wrap_under
from tests.engine.residual import batches as rows

WIDTH = 32


class Block(nn.Module):
    """Saves the sigmoid and its own output, not its input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.changes = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.enter(x * 0.5))
        output = torch.tanh(self.leave(hidden * 2.0))
        if self.changes == "saved":
            hidden.mul_(2.0)
        return output


class Model(residual.Model):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4, lambda _: Block())
        self.changes = ""

    def change(self, what: str) -> None:
        """From now on the second block, or its caller, changes something."""
        block: Any = self.blocks[1]
        self.changes = block.changes = what

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) * 1.0
        for index, block in enumerate(self.blocks):
            y = block(x)
            if index == 1 and self.changes == "output":
                y.mul_(2.0)
            if index == 1 and self.changes == "input":
                x.mul_(2.0)
            x = y * 1.0
        return self.leave(x)


@pytest.mark.parametrize("persist", ["all", "none"])
@pytest.mark.parametrize(
    ("what", "mode", "packed"),
    [
        ("saved", "n", False),
        ("saved", "s", False),
        ("saved", "s", True),
        ("output", "n", False),
        ("output", "s", False),
        ("output", "s", True),
        ("input", "c", False),
        ("input", "i", False),
    ],
    ids=str,
)
def test_what_backward_needs_was_changed(
    what: str, mode: str, packed: bool, persist: str, device: torch.device
) -> None:
    spec = Spec(persist, "least", mode, packed=packed)
    with unharmed(spec, Model, rows(2), device=device) as (model, optimizer):
        model.change(what)
        needs = "its inputs" if what == "input" else "tensors that it saved"
        with pytest.raises(MisuseError, match=rf"backward through blocks.1 needs {needs}.*in place.*clone\(\)"):
            Loop().run(model, optimizer, rows(2))
        with torch.no_grad():  # where there is no backward nothing is wrong
            model(*rows()[0])
        model(*rows()[0])
        model.change("")
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["n", "s"], ids=str)
def test_inputs_that_nobody_saved_may_change(mode: str, device: torch.device) -> None:
    def run(model: Any, optimizer: Any, data: Any) -> list[float]:
        model.change("input")
        return Loop().run(model, optimizer, data)

    check_equal_to_plain(Model, rows(2), run=run, device=device, specs=[Spec("none", "least", mode)])


# -- views of weights that are kept ------------------------------------------------------------------------------------

SPECS = tuple(Spec(persist, "least", mode) for persist in ("none", "all") for mode in "ncs")


class Product(torch.autograd.Function):
    """x @ w, whose backward needs a view of w: in an attribute of ctx, or saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, saves: bool) -> Tensor:
        view = weight.t()
        ctx.saves = saves
        if saves:
            ctx.save_for_backward(x, view)
        else:
            ctx.save_for_backward(x)
            ctx.view = view
        return x @ view

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, view = ctx.saved_tensors if ctx.saves else (*ctx.saved_tensors, ctx.view)
        (gradient,) = gradients
        return gradient @ view.t(), gradient.t() @ x, None


class Keeping(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps = keeps
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.keeps == "attribute":
            self.kept = weight[0]
        if self.keeps == "cycle":  # only the collector can tell that it is of no use
            kept: list[Any] = [weight[0]]
            kept.append(kept)
        return torch.tanh(Product.apply(x, weight, self.keeps != "context")) + x


def make_keeping(keeps: str) -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Sequential(*(Keeping(keeps) for _ in range(3))), nn.Linear(WIDTH, 4))


KEPT = r"1\.0 keeps a view of a weight \(1\.0\.linear\.weight, .*\) after its for"


@pytest.mark.parametrize("keeps", ["nothing", "cycle"])
def test_views_that_are_saved(keeps: str, device: torch.device) -> None:
    check_equal_to_plain(lambda: make_keeping(keeps), rows(2), device=device, specs=SPECS[keeps == "cycle" :: 2])


@pytest.mark.parametrize(("spec", "keeps"), [*zip(SPECS, ("context", "attribute") * 3, strict=True)], ids=str)
def test_views_that_are_kept(keeps: str, spec: Spec, device: torch.device) -> None:
    model = make_keeping(keeps)
    wrapped, _ = wrap_under(spec, model, adamw(model), rows()[0], device=device)
    with pytest.raises(MisuseError, match=KEPT):
        wrapped(*rows()[0])
