"""Misuse, and more than the plan has room for: one error that names the thing and the remedy, and nothing is lost."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import BudgetError, MisuseError
from protrain.engine.streams import CudaStreams
from tests.engine.harness import Spec, adamw, assert_same, default_loss, states, wrap_under
from tests.engine.residual import batches, make, unharmed, wrapped

OFFLOADED, RESIDENT = Spec("none", "least", "ncs"), Spec("all", "least", "n")
BOTH = pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)


def test_what_is_added_after_wrapping_is_left_alone_as_by_any_optimizer() -> None:
    model, optimizer = wrapped(OFFLOADED)
    model.added = added = nn.Linear(3, 3)
    before = added.weight.detach().clone()
    (default_loss(model, batches()[0]) + added.weight.sum()).backward()
    optimizer.step()
    assert torch.equal(added.weight, before)
    assert added.weight.grad is not None, "another optimizer may train it"


@pytest.mark.parametrize(
    ("factor", "kind", "arguments", "words"),
    [
        (1.0, ValueError, {"max_norm": 0.0}, "max_norm must be a positive number, not 0.0"),
        (1.0, ValueError, {"max_norm": math.nan}, "max_norm must be a positive number, not nan"),
        (1.0, ValueError, {"max_norm": 1.0, "norm_type": math.inf}, "norm_type must be 2.0, not inf"),
        (math.inf, RuntimeError, {"max_norm": 1.0, "error_if_nonfinite": True}, "norm of the gradients is (nan|inf)"),
    ],
)
@BOTH
def test_clip_refuses_what_it_cannot_do(
    spec: Spec, factor: float, kind: type[Exception], arguments: Any, words: str
) -> None:
    with unharmed(spec) as (model, optimizer):
        (default_loss(model, batches()[0]) * factor).backward()
        with pytest.raises(kind, match=words):
            optimizer.clip_grad_norm_(**arguments)
        optimizer.zero_grad()


def pickled(model: nn.Module) -> None:
    torch.save(nn.ModuleDict({"held": model}), io.BytesIO())


MOVES: list[tuple[Callable[[nn.Module], Any], str]] = [
    (lambda model: model.half(), "cannot be moved from cpu in torch.float32"),
    (lambda model: model.get_submodule("blocks.0").double(), "cannot be moved from cpu in torch.float32"),
    (lambda model: model.to("meta"), "cannot be moved from cpu in torch.float32"),
    (pickled, r"cannot be copied or pickled whole: use model.state_dict\(\)"),
    (torch.optim.swa_utils.AveragedModel, "protrain.AveragedWeights"),
]


@BOTH
def test_a_wrapped_model_stays_where_it_is(spec: Spec) -> None:
    with unharmed(spec) as (model, _):
        for move, words in MOVES:
            with pytest.raises(MisuseError, match=words):
                move(model)
        assert model.to("cpu") is model
        assert model.float() is model


def test_a_step_in_the_middle_of_a_blocks_backward_is_refused() -> None:
    """The first block's: no other unit's backward follows that would tell."""
    model, optimizer = wrapped(RESIDENT)
    steps: list[None] = []
    model.get_parameter("blocks.0.second.weight").register_hook(lambda _: steps.append(optimizer.step()))
    with pytest.raises(MisuseError, match=r"backward through blocks.0, whose weights optimizer.step\(\)"):
        default_loss(model, batches()[0]).backward()
    assert len(steps) == 1


# -- kernels of another stream than the one that copies are ordered with -----------------------------------------------


def test_forward_and_step_on_another_stream_are_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["compute"]

    @contextmanager
    def another_stream() -> Iterator[None]:
        current[0] = "another"
        with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
            yield
        current[0] = "compute"

    with unharmed(OFFLOADED, device=device) as (model, optimizer):
        if device.type == "cpu":  # as if it were a GPU
            named = CudaStreams.__new__(CudaStreams)
            vars(named).update(device=device, compute="compute")
            monkeypatch.setattr(optimizer._engine.streams, "refuse_another", named.refuse_another)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
        with another_stream(), pytest.raises(MisuseError, match="the current CUDA stream is not the one"):
            model(*batches()[0])
        default_loss(model, batches()[0]).backward()
        with another_stream(), pytest.raises(MisuseError, match=r"outside `with torch.cuda.stream\(...\)`"):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True])
def test_backward_alone_may_be_called_on_another_stream(inside: bool) -> None:
    results = []
    cuda = torch.device("cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        model = make(width=1024)
        wrapped, optimizer = wrap_under(
            Spec("some", "least", "c"), model, adamw(model), batches()[0], device=cuda, step_during_backward=inside
        )
        for batch in batches():
            torch.manual_seed(1)
            loss = default_loss(wrapped, batch)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])


# -- memory while running ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "words"),
    [("n", "simulated device is full"), ("c", "simulated device is full"), ("s", "no host memory to swap another")],
)
def test_more_forwards_than_there_is_room_for(mode: Any, words: str) -> None:
    options: dict[str, Any] = {"tight_host": True} if mode == "s" else {"tight": True}
    with unharmed(Spec("none", "least", mode), **options) as (model, _):
        losses: list[Tensor] = []
        with pytest.raises(BudgetError, match=rf"{words}.*call backward\(\) before the next"):
            losses.extend(default_loss(model, batches()[0]) for _ in range(200))
        losses.clear()
