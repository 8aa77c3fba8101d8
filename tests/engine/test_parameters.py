"""Parameters between steps: they read as those of the plain model, and what would write to them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import protrain
from protrain.common.errors import MisuseError
from tests.engine import harness
from tests.engine.harness import Loop, Spec, adamw, assert_same, default_loss, seeded, wrap_under
from tests.engine.residual import batches, make, unharmed, wrapped

RESIDENT = Spec("all", "least", "n")
SPECS = (
    RESIDENT,
    Spec("some", "least", "csn", speculate=True),
    Spec("none", "least", "nc", small=True, speculate=True, weights=True),
    Spec("none", "least", "c", stream=True),
)
NAME = "blocks.1.first.weight"

READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "product": lambda p: p * 2,
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data,
    "transposed": lambda p: p.t().contiguous(),
    "list": lambda p: p.tolist(),
    "among others": lambda p: torch.stack([torch.zeros_like(p), p]),
    "linear": lambda p: F.linear(torch.ones(2, p.shape[1], dtype=p.dtype, device=p.device), p),
    "numpy": lambda p: p.detach().cpu().numpy().copy(),
    "average": lambda p: torch.zeros_like(p).lerp_(p.detach(), 0.25),
    "strides": lambda p: (p.stride(), p.is_contiguous(), p.storage_offset() >= 0),
    "inference": lambda p: torch.inference_mode()(lambda: p.sum().item())(),
    "as large": lambda p: torch.ones(1, device=p.device).expand_as(p).sum(),
}


def _comparable(value: Any) -> Any:
    return value.detach().cpu().tolist() if isinstance(value, Tensor) else getattr(value, "tolist", lambda: value)()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_parameter_reads_as_the_plain_models(spec: Spec, device: torch.device) -> None:
    model, optimizer = wrapped(spec, device=device)
    Loop().run(model, optimizer, batches(1))
    parameter, plain = model.get_parameter(NAME), nn.Parameter(model.state_dict()[NAME].to(device))
    for name, read in READS.items():
        assert _comparable(read(parameter)) == _comparable(read(plain)), name


def test_views_of_what_was_read_are_read_only_and_end_with_the_step(device: torch.device) -> None:
    for spec in SPECS:
        model, optimizer = wrapped(spec, device=device)
        parameter = model.get_parameter(NAME)
        view = parameter.detach()[1:]
        kept = parameter.detach().clone()
        kept.mul_(2.0)  # the script's own
        assert torch.equal(kept[1:], view * 2)
        with pytest.raises(MisuseError, match=rf"data of {NAME} was changed in place"):
            view[0].zero_()
        with pytest.raises(MisuseError, match=rf"memory of {NAME} cannot be read .*untyped_storage"):
            parameter.untyped_storage()
        late = parameter.square().sum()
        (default_loss(model, batches()[0]) + parameter.square().sum()).backward()
        optimizer.step()
        with pytest.raises(MisuseError, match=rf"a use of a copy of {NAME}, which optimizer.step\(\)"):
            view.sum()
        with pytest.raises(MisuseError, match=rf"backward through a copy of {NAME}, which optimizer.step\(\)"):
            late.backward()


def test_tied_parameters_are_told_by_their_address(device: torch.device) -> None:
    for spec in SPECS:
        addresses = [parameter.data_ptr() for parameter in wrapped(spec, device=device)[0].parameters()]
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


# -- flags and edits ---------------------------------------------------------------------------------------------------


def make_with_a_frozen_block() -> nn.Module:
    model = make()
    model.get_submodule("blocks.1").requires_grad_(False)
    return model


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_what_was_frozen_when_wrapped_cannot_be_trained(spec: Spec, device: torch.device) -> None:
    """It may be thawed for a forward without gradients, as peft does it for the reference model of TRL's DPOTrainer."""
    data = batches(3)
    unharmed = harness.unharmed(spec, make_with_a_frozen_block, data, device=device, dtype=torch.bfloat16)
    with unharmed as (model, _):
        block, frozen = model.get_submodule("blocks.1"), model.get_parameter(NAME)
        thaws: list[Callable[[], Any]] = [
            lambda: model.requires_grad_(True),
            lambda: frozen.requires_grad_(),
            lambda: setattr(frozen, "requires_grad", True),
        ]
        for thaw in thaws:
            thaw()
            assert frozen.requires_grad
            with torch.no_grad():
                model(*data[0])
            with pytest.raises(MisuseError, match=r"blocks\.1\..* was frozen when .* wrapped.*wrap the model anew"):
                model(*data[0])
            block.requires_grad_(False)
            assert not frozen.requires_grad


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_a_wrong_shape_keeps_no_edit_and_does_no_harm(spec: Spec, device: torch.device) -> None:
    def edit(model: nn.Module) -> None:
        with protrain.full_parameters(model), torch.no_grad():
            model.get_parameter("enter.weight").zero_()
            model.get_parameter("blocks.1.norm.bias").data = torch.zeros(7)

    words = r"blocks\.1\.norm\.bias was given the shape \(7,\), not \(48,\): no edit"
    with unharmed(spec, device=device) as (model, _), pytest.raises(ValueError, match=words):
        edit(model)


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_nothing_runs_inside_full_parameters(spec: Spec, device: torch.device) -> None:
    with unharmed(spec, device=device) as (model, optimizer):
        loss = default_loss(model, batches(1)[0])
        runs: list[tuple[str, Callable[[], Any]]] = [
            ("the forward of enter", lambda: model(*batches(1)[0])),
            (r"backward\(\)", loss.backward),
            (r"step\(\)", optimizer.step),
            (r"export_parameter\(\)", lambda: optimizer.export_parameter("enter.weight")),
            (r"state_dict\(\)", optimizer.state_dict),
        ]
        for what, run in runs:
            words = rf"{what} inside .*full_parameters.*which has blocks.1.*leave it first"
            with pytest.raises(MisuseError, match=words), protrain.full_parameters(model.get_submodule("blocks.1")):
                run()


# -- edits elsewhere ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [RESIDENT, Spec("none", "least", "c")], ids=str)
def test_a_forward_that_edits_its_weight_is_refused(spec: Spec, device: torch.device) -> None:
    """As an embedding with max_norm does. Every later use is refused, too: the weight of the last step may be gone."""
    ids = torch.arange(32).view(2, 16)
    inner = nn.Sequential(nn.Embedding(32, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    model, _ = wrap_under(spec, inner, adamw(inner), (ids,), device=device, dtype=torch.bfloat16)
    embedding: Any = model.get_submodule("0")
    for max_norm in (1e6, None):  # no row is that long, and autograd counts it as an edit all the same
        embedding.max_norm = max_norm
        with pytest.raises(MisuseError, match=r"data of 0\.weight was changed in place .*full_parameters"):
            model(ids)


@pytest.mark.parametrize("inside", [False, True], ids=["step", "step-during-backward"])
def test_an_option_that_is_not_known_is_refused_after_wrapping_too(inside: bool, device: torch.device) -> None:
    with unharmed(SPECS[1], device=device, step_during_backward=inside) as (model, optimizer):
        optimizer.param_groups[1]["maximize"] = True
        with pytest.raises(ValueError, match="maximize=True of Adam and AdamW is not supported"):
            Loop().run(model, optimizer, batches())
        optimizer.param_groups[1]["maximize"] = False
        optimizer.zero_grad()
        state = optimizer.state_dict()
        state["param_groups"][0]["amsgrad"] = True
        with pytest.raises(ValueError, match="amsgrad=True of Adam and AdamW is not supported"):
            optimizer.load_state_dict(state)
