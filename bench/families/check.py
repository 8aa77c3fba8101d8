"""Trains one family under several plans and compares every bit with the plain loop.

A run is two steps, a forward in evaluation, and two more steps, with clipping and a learning rate that changes. What is
compared: every loss and norm, what the forward in evaluation returns, and at the end the state dict, the fp32 masters
and both moments.
"""

from __future__ import annotations

import copy
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import protrain
from bench.families.family import Family
from protrain.common.parameters import same_bytes
from protrain.common.records import Record
from protrain.hardware.detection import detect
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import search
from protrain.profiler.model_profile import ModelProfile
from tests.engine.harness import CKPT, CKPT_SWAP, NONE, SWAP, Loop, Spec, Trainer, adamw, states, wrap_under
from tests.engine.plain_loop import prepare_plain
from tests.engine.profiles import share_profiles, shared_profile

Wrapped: TypeAlias = tuple[nn.Module, ProTrainOptimizer]
SAME = "same bits"
_DEVICE = torch.device("cpu")
_MEMORY = "4GiB"  # more than any family takes
FORCED = (
    Spec("none", "least", (NONE,), small=True, speculate=True),
    Spec("none", "least", (CKPT,), speculate=True),
    Spec("none", "least", (SWAP,), small=True, packed=True),
    Spec("none", "least", (CKPT_SWAP,)),
    Spec("some", "least", (SWAP, CKPT), small=True, stream=True),
)


@dataclass(frozen=True, kw_only=True)
class Trial(Record):
    """One plan, and what came of it: ``SAME``, or what differed or was raised."""

    name: str
    plan: str
    verdict: str


@dataclass(frozen=True, kw_only=True)
class FamilyResult(Record):
    """All plans of one family."""

    family: str
    kind: str
    model: str
    parameters: int
    blocks: int
    seconds: float
    trials: tuple[Trial, ...]

    @property
    def is_same(self) -> bool:
        """Whether every plan had the bits of the plain loop."""
        return all(trial.verdict == SAME for trial in self.trials)


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves behind: losses and norms; outputs in evaluation, weights, masters and moments by name."""

    values: list[float]
    tensors: dict[str, Tensor]

    def difference(self, plain: Outcome) -> str:
        """``SAME``, or the first thing that differs from the plain loop."""
        if self.values != plain.values:
            return f"losses and norms {self.values}, not {plain.values}"
        ours, theirs = self.tensors, plain.tensors
        if ours.keys() != theirs.keys():
            return f"only one of both has {', '.join(sorted(ours.keys() ^ theirs.keys()))}"
        return next((f"{name} differs" for name, value in ours.items() if not same_bytes(value, theirs[name])), SAME)


def check_family(family: Family) -> FamilyResult:
    """Train ``family`` in the plain loop and under every plan."""
    start = time.perf_counter()
    torch.manual_seed(0)
    template = family.make()
    gc.collect()
    gc.freeze()  # the objects of large libraries, which the collections in wrap would visit
    model = copy.deepcopy(template)
    expected = _run(family, *prepare_plain(model, adamw(model), device=_DEVICE, dtype=torch.float32))
    assert len(set(expected.values)) > 1, f"the plain loop of {family.name} does not train"
    blocks, trials = 0, []
    with pytest.MonkeyPatch.context() as patch:
        share_profiles(patch)  # the first call is profiled, and its profile serves all plans
        for way, wrap in _ways(family.batches(1)[0]):
            model, plan = copy.deepcopy(template), ""
            try:
                wrapped, optimizer = wrap(model, adamw(model))
                found = _run(family, wrapped, optimizer)
                plan, blocks = str(optimizer.plan), len(optimizer.plan.block_modes)
                verdict = found.difference(expected)
            except Exception as error:  # whatever it is, it is the verdict on this plan
                verdict = f"{type(error).__name__}: {error}"
            trials.append(Trial(name=way, plan=plan, verdict=verdict))
    return FamilyResult(
        family=family.name,
        kind=family.kind,
        model=type(template).__name__,
        parameters=sum(parameter.numel() for parameter in template.parameters()),
        blocks=blocks,
        seconds=round(time.perf_counter() - start, 1),
        trials=tuple(trials),
    )


def _ways(example: Any) -> list[tuple[str, Callable[..., Wrapped]]]:
    """The names of the plans, and functions that wrap a model under each."""
    options: dict[str, Any] = {"device": _DEVICE, "dtype": torch.float32, "host_memory": _MEMORY, "progress": False}
    options["chunked_loss"] = False  # as the plain loop has whole logits

    def loose(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return protrain.wrap(model, optimizer, device_memory=_MEMORY, **options)

    def tight(model: nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        profile = shared_profile(model, example, optimizer=optimizer, device=_DEVICE, dtype=torch.float32)
        least = least_device_bytes(profile)
        return protrain.wrap(model, optimizer, example_batch=example, device_memory=least, **options)

    def forced(spec: Spec) -> Callable[..., Wrapped]:
        return lambda model, optimizer: wrap_under(spec, model, optimizer, example, device=_DEVICE)

    return [
        ("loose, planned at the first call", loose),
        ("tight", tight),
        *((f"forced {spec}", forced(spec)) for spec in FORCED),
    ]


def least_device_bytes(profile: ModelProfile) -> int:
    """The device memory below which no plan fits, as the error for much too little states it."""
    try:
        search(profile, replace(detect(_DEVICE, device_memory=_MEMORY, host_memory=_MEMORY), device_bytes=1))
    except protrain.PlanError as error:
        return error.needed_bytes
    raise AssertionError("a plan fits one byte")


def _run(family: Family, model: nn.Module, optimizer: Trainer) -> Outcome:
    """Train ``model``, with the same random numbers in every run."""
    batches = family.batches(4)
    loop = Loop(max_norm=0.5, loss=family.loss)
    random.seed(0)
    np.random.seed(0)
    values = loop.run(model, optimizer, batches[:2])
    outputs = _evaluated(model.eval(), batches[2])
    values += loop.run(model.train(), optimizer, batches[2:], seed=2)
    return Outcome(values, outputs | states(model, optimizer))


@torch.no_grad()
def _evaluated(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The tensors that the model returns."""
    torch.manual_seed(3)
    leaves = tree_leaves(model(**batch))
    return {f"output {at}": leaf.detach().clone() for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
