"""Runs a random script on both sides, on one process or several, and compares what they find.

At the end a checkpoint is loaded by another training.

An action that ProTrain refuses must leave everything as it was, so the plain loop leaves it out. After it the step is
forgotten, on both sides.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import protrain
from protrain.common.errors import BudgetError, MisuseError, PlanError
from tests.distributed.pool import on_ranks
from tests.engine.harness import PLANS, assert_same, states
from tests.random_scripts import between, steps
from tests.random_scripts.draw import WITH_A_BATCH, WITH_A_FOLDER, Action, draw, told
from tests.random_scripts.models import MODELS, OF_ONE_PROCESS, batch
from tests.random_scripts.plain_side import Plain
from tests.random_scripts.sides import Case, Side, Wrapped

_BACKWARDS = (
    steps.backward,
    steps.plain_backward,
    steps.backward_of_pending,
    steps.backward_of_list,
    steps.backward_to_weight,
)
Outcome = tuple[str, list[Any]]  # "done", "refused" or "failed", and the values or the reason
States = dict[str, Tensor]


def case_of(seed: int, ranks: int = 1) -> tuple[Case, list[Action]]:
    """The script of ``seed`` and what it runs on."""
    rng = random.Random(seed)
    models = sorted(MODELS.keys() - (OF_ONE_PROCESS if ranks > 1 else set()))
    model = rng.choice(models)
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    inside = dtype is not torch.float16 and rng.random() < 0.3
    more: Any = {"narrow": rng.random() < 0.2, "accumulation": rng.choice((1, 4, 4))}
    # The first batch must call all blocks, which that of a routed model may not do.
    late = rng.random() < 0.2 and model != "routed"
    case = Case(model, dtype, rng.choice(PLANS), inside, ranks, **more, late=late)
    return case, draw(rng, case)


class DiffersError(AssertionError):
    """The two sides do not agree."""


def compare(case: Case, script: Sequence[Action]) -> list[str]:
    """Run ``script`` on both sides. Returns what was refused. DiffersError if they do not agree."""
    with tempfile.TemporaryDirectory() as folder:
        if case.ranks == 1:
            of_ranks = [run_wrapped(0, case, script, folder)]
        else:
            of_ranks = on_ranks(case.ranks, run_wrapped, case, list(script), folder)
        loaded = _loaded(case, Path(folder, "final"))
    traces = [trace for trace, _ in of_ranks]
    plain, refused = Plain(case), []
    for place, (action, options) in enumerate(script):
        text = f"{place} {told((action, options))}"
        outcomes = [trace[place] for trace in traces]
        if len({what for what, _ in outcomes}) > 1:
            raise DiffersError(f"{text}: ranks differ: {outcomes}")
        what, found = outcomes[0]
        if what == "refused":
            refused.append(f"{text}: {found[0]}")
            if found[1]:  # the forward was made, and has changed buffers
                torch.manual_seed(_seed(place, 0))
                steps.loss_of(plain.model, **_of_rank(options, 0))
            plain.give_up()
            continue
        try:
            expected = _run_plain(plain, place, action, options)
        except RuntimeError as error:
            if what != "failed":
                raise DiffersError(f"{text}: only the plain loop fails: {error}") from error
            plain.give_up()
            continue
        if what == "failed":
            raise DiffersError(f"{text}: only the wrapped model fails: {found[0]}")
        for rank, (mine, right) in enumerate(zip([found for _, found in outcomes], expected, strict=True)):
            if not _same(mine, right):
                raise DiffersError(f"{text}: rank {rank} has {mine} and not {right}")
        _end_if_updated(plain, action, expected[0])
    final = _final(plain)
    for rank, (_, ours) in enumerate(of_ranks):
        try:
            assert_same(ours, final)
        except AssertionError as error:
            raise DiffersError(f"at the end, rank {rank}: {error}") from error
    try:
        assert_same(loaded, final)
    except AssertionError as error:
        raise DiffersError(f"loaded at the end: {error}") from error
    return refused


def _loaded(case: Case, folder: Path) -> States:
    """The states of another training, on one process and under another plan, that loads a checkpoint twice."""
    plan = PLANS[len(case.model) % len(PLANS)]
    side = Wrapped(replace(case, ranks=1, late=False, spec=plan))
    for _ in range(2):
        protrain.load_checkpoint(folder, side.model, side.optimizer)
    return states(side.model, side.optimizer)


def run_wrapped(rank: int, case: Case, script: Sequence[Action], folder: str) -> tuple[list[Outcome], States]:
    """The outcome of every action on one rank, and the states at the end."""
    side, trace = Wrapped(case), []
    for place, (action, options) in enumerate(script):
        buffers = [buffer.clone() for buffer in side.model.buffers()]
        torch.manual_seed(_seed(place, rank))
        if action in WITH_A_FOLDER:
            options = {**options, "folder": Path(folder, str(place))}
        try:
            found = steps.perform(side, action, _of_rank(options, rank))
        except (BudgetError, MisuseError, PlanError, ValueError) as error:
            ran = between.resume is not action and not _same(list(side.model.buffers()), buffers)
            trace.append(("refused", [f"{type(error).__name__}: {error}", ran]))
            side.give_up()
        except RuntimeError as error:
            trace.append(("failed", [str(error)]))
            side.give_up()
        else:
            trace.append(("done", [value.detach().clone() if isinstance(value, Tensor) else value for value in found]))
            _end_if_updated(side, action, found)
    final = _final(side)
    protrain.save_checkpoint(Path(folder, "final"), side.model, side.optimizer)
    return trace, final


def _run_plain(plain: Plain, place: int, action: Any, options: dict[str, Any]) -> list[list[Any]]:
    """What every rank should have found. One process takes the batches of all ranks one after another."""
    if action in WITH_A_FOLDER:
        options = {**options, "folder": Path()}
    found = []
    for rank in range(plain.case.ranks):
        if rank == 0 or action in WITH_A_BATCH:
            torch.manual_seed(_seed(place, rank))
            plain.act_for(rank)
            found.append(steps.perform(plain, action, _of_rank(options, rank)))
        else:
            found.append(found[0])
    return found


def _end_if_updated(side: Side, action: Any, found: list[Any]) -> None:
    if side.case.inside and found and action in _BACKWARDS:
        with suppress(MisuseError):  # no weight has got a gradient, as all are frozen
            side.optimizer.step()
        side.zero_grad()


def _final(side: Side) -> States:
    side.give_up()
    for parameter in side.trained:
        parameter.requires_grad_(True)
    if side.case.late:  # and the script may not have called the model
        torch.manual_seed(0)
        side.model(batch(0))
    return states(side.model, side.optimizer)


def _seed(place: int, rank: int) -> int:
    return 100 * place + rank


def _of_rank(options: dict[str, Any], rank: int) -> dict[str, Any]:
    """``options`` with the batch of ``rank``."""
    found = {**options, "seed": 10 * options["seed"] + rank} if "seed" in options else {**options}
    if isinstance(options.get("size"), tuple):
        found["size"] = options["size"][rank]
    return found


def _same(mine: list[Any], right: list[Any]) -> bool:
    def equal(one: Any, other: Any) -> bool:
        if not isinstance(one, Tensor):
            return bool(one == other)
        return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())

    return len(mine) == len(right) and all(map(equal, mine, right))
