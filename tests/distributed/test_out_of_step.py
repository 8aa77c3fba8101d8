"""One rank does something else than the others: a table of what it does, and of the error that every rank raises."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import protrain
import protrain.distributed.ranks
from protrain.distributed import watch
from protrain.optim.optimizer import ProTrainOptimizer
from tests.distributed.pool import error_of, errors_on, on_ranks
from tests.engine import residual
from tests.engine.harness import adamw, assert_same, default_loss

Act = Callable[[Any, Any], object]

QUICK = {"TICK_S": 0.3, "CAUGHT_S": 1.0, "STUCK_S": 0.8}  # for tests of what is said rather than when


@contextmanager
def quick(**times: float) -> Iterator[None]:
    """The watcher's times are short, but for ``times``, in seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in {**QUICK, **times}.items():
            patch.setattr(watch, name, seconds)
        yield


def wrapped(*, depth: int = 3, fails: str = "", **options: Any) -> tuple[nn.Module, ProTrainOptimizer]:
    """A model whose second block ``fails`` in forward or backward."""
    model = residual.make(width=16, depth=depth)
    vars(model.get_submodule("blocks.1"))["fails"] = fails
    usual = {"example_batch": residual.batches(1)[0], "device": "cpu", "progress": False} | options
    memory = "64MiB" if usual["device"] == "cpu" else "4GiB"  # NCCL takes more than 1 GiB of a GPU
    return protrain.wrap(model, adamw(model), **({"device_memory": memory} | usual))


def step(model: nn.Module, optimizer: ProTrainOptimizer, device: str = "cpu") -> None:
    """A step, whose batch is another one on each rank."""
    (batch,) = residual.batches()[dist.get_rank()]
    default_loss(model, (batch.to(device),)).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(act: Act = lambda model, optimizer: None, *, device: str = "cpu", **options: Any) -> None:
    """Four steps, and ``act`` before the third."""
    model, optimizer = wrapped(device=device, **options)
    for at in range(4):
        if at == 2:
            act(model, optimizer)
        step(model, optimizer, device)


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What rank 1 does otherwise, and how the errors begin. Three dots stand for anything, and {} for ``own``."""

    others: str
    own: str = ""  # else that of the others
    act: Act = lambda model, optimizer: None
    options: dict[str, Any] = field(default_factory=dict)


def evaluate(model: nn.Module, optimizer: ProTrainOptimizer) -> None:
    with torch.no_grad():
        model(*residual.batches()[0])


def fail(where: str) -> Act:
    return lambda model, optimizer: setattr(model.get_submodule("blocks.1"), "fails", where)


def look(model: nn.Module, optimizer: ProTrainOptimizer) -> None:
    with protrain.full_parameters(model):
        pass


def barrier(*_: object) -> None:
    dist.barrier()


CAME, RAISED = "MisuseError: rank 1 came to ", "MisuseError: rank 1 has raised an exception in "
IS_IN = "MisuseError: rank 1 is in torch.distributed."
HAS = "MisuseError: rank 1 has another "
FAULTS = {
    "a forward": Fault(
        CAME + "a forward, while OTHERS came to a backward. All ranks must make the same calls",
        act=lambda model, optimizer: model(*residual.batches()[0]),
    ),
    "evaluation": Fault(CAME + "a forward under torch.no_grad(), while OTHERS came to a forward. ", act=evaluate),
    "state_dict": Fault(
        CAME + "state_dict(), while OTHERS came to a forward", act=lambda model, optimizer: model.state_dict()
    ),
    "full_parameters": Fault(CAME + "full_parameters(), while OTHERS came to a forward", act=look),
    "hyperparameters": Fault(
        "MisuseError: rank 1 has other hyperparameters than rank 0 (lr of group 0 is 0.05, not 0.003; beta1 of ",
        act=lambda model, optimizer: optimizer.param_groups[0].update(lr=0.05, betas=(0.8, 0.999)),
    ),
    "barrier": Fault(IS_IN + "barrier(), while OTHERS went on to a forward. All ranks must", act=barrier),
    "an error in forward": Fault(
        RAISED + "a forward, while OTHERS went on to ...: {}", "ArithmeticError: forward fails", act=fail("forward")
    ),
    "an error in backward": Fault(  # autograd tells it to the script alone
        RAISED + "a backward, while OTHERS went on to the ", "ArithmeticError: backward fails", act=fail("backward")
    ),
    "an error in the profile": Fault(
        RAISED + "protrain.wrap, while OTHERS went on to ...: {}",
        "ArithmeticError: forward fails",
        options={"fails": "forward"},
    ),
    "a wrong argument": Fault(
        RAISED + "protrain.wrap, while OTHERS went on to ...: {}",
        "ValueError: device must be a CUDA GPU or the CPU, not 'tpu'",
        options={"device": "tpu"},
    ),
    "accumulation": Fault(
        HAS + "way to train than rank 0 ('accumulation=2', not 'accumulation=1')", options={"accumulation": 2}
    ),
    "dtype": Fault(
        HAS + "way to train than rank 0 ('dtype=torch.bfloat16', not 'dtype=torch.float", options={"dtype": "bfloat16"}
    ),
    "no example": Fault(
        HAS + "way to train than rank 0 ('example_batch given: False', not ", options={"example_batch": None}
    ),
    "another model": Fault(HAS + "model than rank 0", options={"depth": 2}),
}


def error_on(rank: int, name: str) -> str:
    fault = FAULTS[name]
    with quick():
        said = error_of(lambda: train(fault.act, **fault.options) if rank == 1 else train())
    if fault.act is barrier and rank != 1:
        fault.act(None, None)  # in which rank 1 still waits
    return said


@pytest.mark.parametrize(("size", "name"), [*((2, name) for name in FAULTS), (3, "a forward")])
def test_one_rank_does_something_else(size: int, name: str) -> None:
    fault, said = FAULTS[name], on_ranks(size, error_on, name)
    others = "rank(s 0, 2| 0| 2)" if size == 3 else "rank 0"  # one of which may come late
    for rank, error in enumerate(said):
        begin = fault.own if rank == 1 and fault.own else fault.others.replace("{}", fault.own)
        assert re.match(re.escape(begin).replace("OTHERS", others).replace(r"\.\.\.", ".*"), error), error


def send_another_size(rank: int) -> None:
    """All ranks issue a collective, and that of rank 1 has more bytes."""
    with quick(TICK_S=1000.0):
        train(lambda model, optimizer: optimizer.ranks.watch.note("a message", 8 + rank))


def test_collectives_of_different_sizes_are_found_at_the_end_of_the_backward() -> None:
    for error in errors_on(2, send_another_size):
        assert error.startswith(CAME + "a message with 9 bytes, while rank 0 came to a message with 8 bytes"), error


# -- what is right -----------------------------------------------------------------------------------------------------


def be_refused(model: nn.Module, optimizer: ProTrainOptimizer) -> None:
    """The batch of rank 1 is too large for its device, and the script catches that."""
    with pytest.raises(protrain.MisuseError):
        model(residual.batches()[0][0].repeat(100_000, 1))


def catch(rank: int) -> None:
    with quick(CAUGHT_S=60.0):
        train(be_refused) if rank == 1 else train()


def test_an_error_that_one_rank_catches_before_it_goes_on_is_none() -> None:
    on_ranks(2, catch)


def wait_for_a_rank(rank: int, what: str) -> float:
    """Before the second step rank 1 waits in a collective for rank 2, which is slow. Returns what that gives."""
    with quick():
        model, optimizer = wrapped()
        step(model, optimizer)
        pair, values, work = dist.new_group([1, 2]), torch.ones(1), None
        if rank == 2:
            time.sleep(2.0)
        if what == "of a pair" and rank != 0:
            dist.barrier(group=pair)
        elif what == "begun before":
            work = dist.all_reduce(values, async_op=rank == 0)
        default_loss(model, residual.batches()[rank]).backward()
        if work is not None:
            work.wait()
    return values.item()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "value"), [("of a pair", 1.0), ("begun before", 3.0)])
def test_a_call_of_the_script_that_ends_by_itself(what: str, value: float) -> None:
    """Its group is without the rank that waits in the model, or that rank has begun the call before."""
    assert on_ranks(3, wait_for_a_rank, what) == [value] * 3


# -- edits -------------------------------------------------------------------------------------------------------------

NAME = "blocks.0.first.weight"
EDITS: dict[str, Callable[[int, nn.Module], object]] = {
    "MisuseError: rank 1 has edited enter.weight inside full_parameters otherwise than rank 0: make the same edits": (
        lambda rank, model: model.get_parameter("enter.weight").zero_() if rank == 0 else None
    ),
    "MisuseError: rank 1 has edited enter.bias inside full_parameters otherwise than rank 0: make the same edits": (
        lambda rank, model: model.get_parameter("enter.bias").fill_(float(rank))
    ),
    "ValueError: enter.bias was given the shape (3": (
        lambda rank, model: setattr(model.get_parameter("enter.bias"), "data", torch.zeros(3)) if rank == 1 else None
    ),
}


def edit(rank: int) -> tuple[dict[str, Tensor], list[str], dict[str, Tensor]]:
    """Edit a weight on all ranks, then in ways that are refused. Returns the weights after each, and the errors."""
    model, _ = wrapped()

    def edit_by(does: Callable[[int, nn.Module], object]) -> None:
        with protrain.full_parameters(model), torch.no_grad():
            does(rank, model)

    edit_by(lambda rank, model: model.get_parameter(NAME).fill_(2.0))
    edited = dict(model.state_dict())
    return edited, [error_of(edit_by, does) for does in EDITS.values()], dict(model.state_dict())


@pytest.mark.slow
def test_edits_are_made_on_all_ranks_or_on_none() -> None:
    expected = residual.make(width=16, depth=3).state_dict()
    expected[NAME] = torch.full_like(expected[NAME], 2.0)
    for edited, errors, after in on_ranks(3, edit):
        assert_same(edited, expected)
        assert_same(after, expected)
        assert [error[: len(said)] for error, said in zip(errors, EDITS, strict=True)] == list(EDITS)


# -- what all ranks must call, and one calls alone ---------------------------------------------------------------------

ALONE: dict[str, Callable[[Any, Any, str], object]] = {
    "state_dict()": lambda model, optimizer, folder: model.get_submodule("blocks.1").state_dict(),
    "load_state_dict()": lambda model, optimizer, folder: model.load_state_dict(
        {NAME: torch.zeros(16, 16)}, strict=False
    ),
    "the optimizer's state_dict()": lambda model, optimizer, folder: optimizer.state_dict(),
    "the optimizer's load_state_dict()": lambda model, optimizer, folder: optimizer.load_state_dict({}),
    "export_parameter()": lambda model, optimizer, folder: optimizer.export_parameter(NAME),
    "full_parameters()": lambda model, optimizer, folder: protrain.full_parameters(model).__enter__(),
    "save_checkpoint()": lambda model, optimizer, folder: protrain.save_checkpoint(folder, model, optimizer),
    "load_checkpoint()": lambda model, optimizer, folder: protrain.load_checkpoint(folder, model, optimizer),
    "async_save()": lambda model, optimizer, folder: protrain.async_save(folder, model, optimizer),
    "protrain.export()": lambda model, optimizer, folder: protrain.export(model, folder),
    "full_state_dict()": lambda model, optimizer, folder: protrain.full_state_dict(model),
    "the optimizer's full_state_dict()": lambda model, optimizer, folder: optimizer.full_state_dict(),
}


def call_alone(rank: int, folder: str) -> list[str]:
    """The ranks take turns. Returns the errors of those calls that were this rank's."""
    errors = []
    for at, call in enumerate(ALONE.values()):
        # What has failed in one group must not disturb the next.
        model, optimizer = wrapped(process_group=dist.new_group(backend="gloo"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protrain.distributed.ranks, "_ABSENT_S", 0.3)
            if rank == at % 2:
                errors.append(error_of(call, model, optimizer, folder))
        dist.barrier()
    return errors


@pytest.mark.slow
def test_a_call_on_one_rank_alone_is_an_error_within_seconds(tmp_path: Path) -> None:
    errors = [error for both in zip_longest(*on_ranks(2, call_alone, str(tmp_path))) for error in both]
    for name, error in zip(ALONE, errors, strict=True):
        assert f" and gives up. Call {name} in every process" in error
    assert not list(tmp_path.iterdir())
