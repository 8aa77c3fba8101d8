"""Views of weights kept where the engine cannot see them are refused: soon they show other weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from tests.engine.harness import CKPT, NONE, SWAP, Spec, adamw, check_equal_to_plain, seeded, wrap_under
from tests.engine.residual import batches

WIDTH = 32
SPECS = tuple(Spec(persist, "least", (mode,)) for persist in ("none", "all") for mode in (NONE, CKPT, SWAP))


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


class Block(nn.Module):
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


def make(keeps: str) -> nn.Module:
    with seeded():
        model = nn.Sequential(nn.Linear(8, WIDTH), nn.Sequential(), nn.Linear(WIDTH, 4))
        model[1] = nn.Sequential(*(Block(keeps) for _ in range(3)))
        return model


KEPT = r"1\.0 keeps a view of a weight \(1\.0\.linear\.weight, .*\) after its for"


@pytest.mark.parametrize("keeps", ["nothing", "cycle"])
def test_views_that_are_saved(keeps: str, device: torch.device) -> None:
    check_equal_to_plain(lambda: make(keeps), batches(2), device=device, specs=SPECS[keeps == "cycle" :: 2])


@pytest.mark.parametrize(("spec", "keeps"), [*zip(SPECS, ("context", "attribute") * 3, strict=True)], ids=str)
def test_views_that_are_kept(keeps: str, spec: Spec, device: torch.device) -> None:
    model = make(keeps)
    wrapped, _ = wrap_under(spec, model, adamw(model), batches()[0], device=device)
    with pytest.raises(MisuseError, match=KEPT):
        wrapped(*batches()[0])


@pytest.mark.parametrize("by_hook", [False, True])
def test_views_that_are_kept_beyond_hooks(by_hook: bool, device: torch.device) -> None:
    """Hooks have the weights before and after forward: what they keep counts, and so does what forward keeps."""
    kept: list[Tensor] = []

    def hook(block: Any, *_: Any) -> None:
        if by_hook:
            kept.append(block.linear.weight[0])

    model = make("nothing" if by_hook else "context")
    wrapped, _ = wrap_under(Spec("none", "all", (NONE,)), model, adamw(model), batches()[0], device=device)
    model.get_submodule("1.0").register_forward_hook(hook)
    with pytest.raises(MisuseError, match=KEPT):
        wrapped(*batches()[0])


def test_a_view_from_an_evaluation_is_nobodys_fault(device: torch.device) -> None:
    model = make("attribute")
    wrapped, _ = wrap_under(SPECS[0], model, adamw(model), batches()[0], device=device)
    with torch.no_grad():
        wrapped(*batches()[0])
    blocks: Any = model.get_submodule("1")
    assert all(block.kept is not None for block in blocks)
    for block in blocks:
        block.keeps = "nothing"
    wrapped(*batches()[0]).sum().backward()
