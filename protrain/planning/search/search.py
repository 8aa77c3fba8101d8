"""The search: the integers that make a step fastest within the memory there is (paper section 4).

It leaves nothing out that could win (:mod:`protrain.planning.search.columns`): first of the plans whose early updates
are whole, then of those that update weights alone. Streamed updates are looked for from the fastest of either kind
(:mod:`protrain.planning.search.streamed_search`), early updates of both kinds at once from the fastest of all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import Any

import numpy as np

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout, choose_chunk_elements, layouts, pack
from protrain.planning.memory.model import MemoryModel
from protrain.planning.plan import BlockMode, Plan, block_modes, layout_of
from protrain.planning.rates.caution import cautious
from protrain.planning.rates.kept_attention import least_ms
from protrain.planning.runtime.model import RuntimeModel
from protrain.planning.search.both_kinds import both_kinds
from protrain.planning.search.columns import WEIGHTS_GAIN, Candidate, Columns
from protrain.planning.search.early_times import times_by_early
from protrain.planning.search.infeasible import device_error, host_error, nothing_fits
from protrain.planning.search.moves import Moves
from protrain.planning.search.streamed_search import STREAMING_GAIN, StreamedSearch
from protrain.profiler.model_profile import ModelProfile, ParameterRecord

# Of plans within this of the fastest, the one with most persistent chunks, then fewest swapped blocks and then fewest
# moved inputs wins: what is not moved cannot be late.
_TOLERANCE = 0.005
_NEAR = 0.03  # of plans within this of the fastest other numbers of early updates are tried
_REFINES = 0.01  # of a step, what another number of early updates than the simulation chooses may save
_NOTHING = 0.001  # what early updates must save at least
_ATTENTION_GAIN = 0.01  # of a step, what keeping attention must save

Counts = tuple[int, int, int, int, int, int]  # n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate


def search(
    profile: ModelProfile,
    hardware: HardwareProfile,
    *,
    chunk_elements: int | None = None,
    step_during_backward: bool = False,
) -> Plan:
    """The fastest plan for ``profile`` on ``hardware`` of those that make whole updates, each on the host, within 1%.

    See _TOLERANCE and Columns. Where one with early weights or with streamed updates is found that is clearly faster,
    or one that keeps attention, that: see WEIGHTS_GAIN and [Note: looking for streamed updates]. Fastest on a machine
    with a slower host: see [Note: caution]. The plan's ``step_ms`` is for ``hardware`` as it is.

    Args:
        profile: of the model and the batch.
        hardware: the machine; its ``device_bytes`` and ``host_bytes`` are the limits.
        chunk_elements: size of a chunk; default: :func:`protrain.planning.layout.choose_chunk_elements`.
        step_during_backward: plan for updates inside backward.

    Raises:
        PlanError: nothing fits; it says what is needed, what is there, and the smallest change that fits.
        ValueError: ``chunk_elements`` does not suit the model.
    """
    plan = _searched(profile, cautious(hardware), chunk_elements, step_during_backward)
    return _Models.of(plan, profile, hardware, step_during_backward).again(plan)


def _searched(
    profile: ModelProfile, hardware: HardwareProfile, chunk_elements: int | None, step_during_backward: bool
) -> Plan:
    found = layouts(profile, chunk_elements)

    def models(*, keep_attention: bool = False) -> list[_Models]:
        return [
            _Models(profile, hardware, layout, step_during_backward, keep_attention=keep_attention) for layout in found
        ]

    plan = _fastest(either := models())
    if plan is None:
        errors = [nothing_fits(one.memory, one.moves) for one in either]
        raise min(errors, key=lambda error: error.needed_bytes - error.available_bytes)
    limit_ms = plan.step_ms * (1 - _ATTENTION_GAIN)
    if least_ms(profile, hardware, plan.step_ms) >= limit_ms + plan.step_ms * _TOLERANCE:
        return plan
    keeping = _fastest(models(keep_attention=True), limit_ms)
    return plan if keeping is None or keeping.step_ms >= limit_ms else keeping


def _fastest(either: list[_Models], limit_ms: float = inf) -> Plan | None:
    """The plan to take of those that are faster than ``limit_ms``, or hardly slower; None where there is none.

    ``either`` has models of every order of chunks. What is to gain something clearly must do so beyond the best of all.
    """
    # No order is limited by what another takes: streamed updates may yet gain what it is slower by.
    found = [_of_order(models, limit_ms) for models in either]
    plan = _of_one_kind(either, found, limit_ms)
    if plan is None:
        return None
    begins = [(models, begin) for models, pair in zip(either, found, strict=True) for begin in pair if begin]
    begins += [(models, plan) for models in either if plan.n_stream and models.layout.large_first is plan.large_first]
    limit_ms = plan.step_ms * (1 - WEIGHTS_GAIN)
    for models, begin in begins:
        if early := both_kinds(begin, *models.kinds[True], limit_ms=limit_ms):
            plan = models.again(replace(begin, n_speculate=early[0], early_weights=True, n_whole=early[1]))
            limit_ms = plan.step_ms
    return plan


def _of_one_kind(either: list[_Models], found: list[tuple[Plan | None, Plan | None]], limit_ms: float) -> Plan | None:
    """The same of plans whose early updates are all whole, or all of weights alone, by what is ``found`` of orders."""
    whole = [best for best, _ in found]
    plan = min(filter(None, whole), key=attrgetter("step_ms"), default=None)
    if plan is not None:
        limit_ms = plan.step_ms * (1 - WEIGHTS_GAIN)
    faster = [weights for _, weights in found if weights is not None and weights.step_ms < limit_ms]
    plan = min(faster, key=attrgetter("step_ms"), default=plan)
    if plan is None or not either[0].runtime.streams:
        return plan
    streamed = [
        (best, at, early_weights)
        for at, models in enumerate(either)
        for early_weights in ((False, True) if models.runtime.speculates else (False,))
        if (begin := (early_weights and found[at][1]) or whole[at])
        and (best := StreamedSearch(*models.kinds[early_weights]).fastest(begin))
    ]
    best, at, early_weights = min(streamed, default=(None, 0, False))
    if best is None or best.step_ms >= plan.step_ms * (1 - STREAMING_GAIN):
        return plan
    return either[at].plan(*best[1:], early_weights=early_weights)


def _of_order(models: _Models, limit_ms: float) -> tuple[Plan | None, Plan | None]:
    """The plan of one order whose early updates are whole, and one of weights alone that is clearly faster, if any."""
    columns = Columns(
        models.profile, models.hardware, models.memory, models.runtime, models.moves, tolerance=_TOLERANCE
    )
    found = columns.walk(limit_ms=limit_ms * (1 + _REFINES))
    whole = _settled(models, found) if found else None
    if whole is not None:
        limit_ms = whole.step_ms * (1 - WEIGHTS_GAIN)
    if models.runtime.speculates and (found := columns.walk(weights=True, limit_ms=limit_ms)):
        weights = models.plan(*models.best_early(min(found)[1:], early_weights=True), early_weights=True)
        if weights.step_ms < limit_ms:
            return whole, weights
    return whole, None


def _settled(models: _Models, found: list[Candidate]) -> Plan:
    """Of plans whose early updates are whole the one to take."""
    near = min(found)[0] * (1 + _NEAR)
    found = [models.refined(candidate) for candidate in found if candidate.step_ms <= near]
    fastest = min(found)[0]
    close = [candidate for candidate in found if candidate[0] <= fastest * (1 + _TOLERANCE)]
    chosen = min(
        close, key=lambda candidate: (-candidate.n_persist, candidate.n_swap, candidate.n_ckpt_swap, candidate)
    )
    limit_ms = fastest * (1 + _TOLERANCE)
    return models.plan(*models.best_early(models.fewer_moved(*models.more_persistent(chosen, limit_ms), limit_ms)))


def evaluate(
    profile: ModelProfile,
    hardware: HardwareProfile,
    *,
    n_persist: int,
    n_buffer: int,
    n_swap: int,
    n_ckpt: int,
    n_ckpt_swap: int = 0,
    n_speculate: int = 0,
    early_weights: bool = False,
    n_whole: int = 0,
    n_stream: int = 0,
    keep_attention: bool = False,
    chunk_elements: int | None = None,
    large_first: bool = False,
    step_during_backward: bool = False,
) -> Plan:
    """The plan of these integers, with its predictions: how to make a plan by hand.

    Raises:
        ValueError: a count is out of range; the message says the range.
        PlanError: the plan does not fit ``hardware``.
    """
    layout = pack(profile, chunk_elements or choose_chunk_elements(profile), large_first=large_first)
    models = _Models(profile, hardware, layout, step_during_backward, keep_attention=keep_attention)
    counts = n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_stream
    models.check_counts(*counts, early_weights=early_weights, n_whole=n_whole)
    plan = models.plan(*counts, early_weights=early_weights, n_whole=n_whole)
    models.check_fits(plan)
    return plan


def check(plan: Plan, profile: ModelProfile, hardware: HardwareProfile, *, step_during_backward: bool = False) -> Plan:
    """``plan``, which may come from a file, with its predictions made anew for ``profile`` and ``hardware``.

    Raises:
        ValueError: the plan was made for another model or optimizer grouping, or contradicts itself.
        PlanError: it does not fit ``hardware``, or the batch of ``profile``.
    """
    expected = fingerprint(profile)
    if plan.model != expected:
        raise ValueError(
            f"the plan was made for another model (fingerprint {plan.model}, this one's is {expected}): parameters, "
            "their optimizer groups or the dtype differ; make a new plan, or leave plan= out to have one searched"
        )
    models = _Models.of(plan, profile, hardware, step_during_backward)
    if plan.n_chunks != len(models.layout.chunks):
        raise ValueError(f"the plan says n_chunks={plan.n_chunks}, but the model has {len(models.layout.chunks)}")
    n_swap, n_moved = (plan.block_modes.count(kind) for kind in (BlockMode.SWAP, BlockMode.CKPT_SWAP))
    n_ckpt = sum(mode.recomputes for mode in plan.block_modes)
    modes = (plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
    if len(plan.block_modes) != len(profile.blocks) or (n_swap, n_ckpt, n_moved) != modes:
        raise ValueError(
            f"the plan's block_modes name {len(plan.block_modes)} blocks, {n_swap} swapped and {n_ckpt} checkpointed, "
            f"{n_moved} of these with moved inputs; the model has {len(profile.blocks)} blocks and the plan says "
            f"n_swap={plan.n_swap}, n_ckpt={plan.n_ckpt}, n_ckpt_swap={plan.n_ckpt_swap}"
        )
    counts = (plan.n_persist, plan.n_buffer, *modes, plan.n_speculate, plan.n_stream)
    models.check_counts(*counts, early_weights=plan.early_weights, n_whole=plan.n_whole)
    fresh = models.again(plan)
    models.check_fits(fresh)
    return fresh


def fingerprint(profile: ModelProfile) -> str:
    """What a plan is valid for: parameters, their shapes and optimizer groups, units, blocks, dtype; not the batch.

    Two parts: what is known without a profile, and the rest.
    """
    units = [(unit.name, unit.block, unit.parameters) for unit in profile.units]
    rest = _digest([units, [block.name for block in profile.blocks]])
    return f"{parameters_fingerprint(profile.parameters, profile.dtype)}-{rest}"


def parameters_fingerprint(parameters: Iterable[ParameterRecord], dtype: str) -> str:
    """The first part of :func:`fingerprint`."""
    return _digest([dtype, [(record.name, record.shape, record.group) for record in parameters]])


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


class _Models:
    """Layout, memory model and runtime model of one search."""

    def __init__(
        self,
        profile: ModelProfile,
        hardware: HardwareProfile,
        layout: Layout,
        step_during_backward: bool,
        *,
        keep_attention: bool = False,
    ) -> None:
        self.keep_attention = keep_attention
        self.profile = profile = profile.keeping_attention() if keep_attention else profile
        self.hardware = hardware
        self.in_backward = step_during_backward
        self.layout = layout
        self.memory = MemoryModel(profile, hardware, layout, update_in_backward=step_during_backward)
        self.moves = Moves(self.memory)
        self.runtime = RuntimeModel(self.memory)
        self.kinds = {  # by whether early updates make weights alone
            False: (self.memory, self.runtime),
            True: (self.memory.making_weights(), self.runtime.making_weights()),
        }

    @classmethod
    def of(cls, plan: Plan, profile: ModelProfile, hardware: HardwareProfile, step_during_backward: bool) -> _Models:
        """Those that ``plan`` is one of."""
        layout = layout_of(profile, plan)
        return cls(profile, hardware, layout, step_during_backward, keep_attention=plan.keep_attention)

    def again(self, plan: Plan) -> Plan:
        """``plan`` with predictions of these models."""
        counts = plan.n_persist, plan.n_buffer, plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap
        return self.plan(
            *counts,
            plan.n_speculate,
            plan.n_stream,
            early_weights=plan.early_weights,
            n_whole=plan.n_whole,
            modes=plan.block_modes,
        )

    def plan(
        self,
        n_persist: int,
        n_buffer: int,
        n_swap: int,
        n_ckpt: int,
        n_ckpt_swap: int,
        n_speculate: int,
        n_stream: int = 0,
        *,
        early_weights: bool = False,
        n_whole: int = 0,
        modes: tuple[BlockMode, ...] | None = None,
    ) -> Plan:
        """The plan with its predictions."""
        profile, (memory, runtime) = self.profile, self.kinds[early_weights]
        modes = modes or block_modes(len(profile.blocks), n_swap, n_ckpt, n_ckpt_swap)
        activations = memory.activations(modes)
        return Plan(
            n_persist=n_persist,
            n_buffer=n_buffer,
            n_swap=n_swap,
            n_ckpt=n_ckpt,
            chunk_elements=self.layout.chunk_elements,
            large_first=self.layout.large_first,
            n_chunks=len(self.layout.chunks),
            block_modes=modes,
            model=fingerprint(profile),
            tokens=profile.tokens,
            accumulation=profile.accumulation,
            moment_dtype=profile.moment_dtype,
            chunked_loss=profile.chunked_loss,
            device_bytes=memory.device_bytes(n_persist, n_buffer, activations, n_stream),
            host_bytes=memory.host_bytes(n_persist, activations, n_speculate, n_whole),
            n_ckpt_swap=n_ckpt_swap,
            keep_attention=self.keep_attention,
            n_speculate=n_speculate,
            early_weights=early_weights and n_speculate > 0,
            n_whole=n_whole,
            n_stream=n_stream,
            n_device_gradient=memory.device_regions(n_persist),
            n_host_gradient=memory.host_regions(n_persist, activations.swapped_bytes),
            step_ms=runtime.step_ms(modes, n_persist, n_buffer, n_speculate, n_stream, n_whole),
            transient_bytes=activations.peak_bytes - activations.held_bytes,
        )

    def more_persistent(self, plan: Candidate, limit_ms: float) -> Counts:
        """The plan with most persistent chunks that fits and takes at most ``limit_ms``; ``plan`` does."""
        memory, n_chunks = self.memory, len(self.layout.chunks)
        modes = block_modes(len(self.profile.blocks), plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
        activations = memory.activations(modes)
        margined_bytes = np.array(memory.margined_bytes(activations))
        for more in range(n_chunks, plan.n_persist, -1):
            buffers = int(memory.most_buffers(more, margined_bytes))
            if buffers < 0:
                continue
            step_ms, early = self.runtime.fitted_ms(
                modes, more, buffers, self.most_early(more, activations.swapped_bytes), limit_ms=limit_ms
            )
            if step_ms < limit_ms:
                return more, buffers, plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap, early
        return plan[1:]

    def fewer_moved(
        self,
        n_persist: int,
        n_buffer: int,
        n_swap: int,
        n_ckpt: int,
        n_ckpt_swap: int,
        n_speculate: int,
        limit_ms: float,
    ) -> Counts:
        """The same with the fewest moved inputs, and the buffers that then fit, that take at most ``limit_ms``."""
        for fewer, buffers, swapped_bytes in self.moves.rooms(n_swap, n_ckpt, n_persist) if n_ckpt_swap else ():
            if fewer >= n_ckpt_swap:
                break
            modes = block_modes(len(self.profile.blocks), n_swap, n_ckpt, fewer)
            most_early = self.most_early(n_persist, swapped_bytes)
            step_ms, early = self.runtime.fitted_ms(modes, n_persist, buffers, most_early, limit_ms=limit_ms)
            if step_ms < limit_ms:
                return n_persist, buffers, n_swap, n_ckpt, fewer, early
        return n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate

    def most_early(self, n_persist: int, swapped_bytes: int, *, early_weights: bool = False) -> int:
        """Early updates that host memory has room for."""
        if not self.runtime.speculates:
            return 0
        return int(self.kinds[early_weights][0].most_early(n_persist, np.array(swapped_bytes)))

    def refined(self, plan: Candidate) -> Candidate:
        """The same with none, all or one more or less of the early updates where that is faster.

        The simulation chooses their number by waits alone; they also slow down what runs beside them.
        """
        modes = block_modes(len(self.profile.blocks), plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
        most = self.most_early(plan.n_persist, self.memory.activations(modes).swapped_bytes)
        best = plan
        for early in sorted({0, most, max(0, plan.n_speculate - 1), min(most, plan.n_speculate + 1)}):
            limit_ms = best.step_ms
            step_ms = self.runtime.step_ms(modes, plan.n_persist, plan.n_buffer, early, limit_ms=limit_ms)
            if step_ms < limit_ms:
                best = best._replace(step_ms=step_ms, n_speculate=early)
        return best

    def best_early(self, counts: Counts, *, early_weights: bool = False) -> Counts:
        """The same with the best number of early updates, or fewer where those save nothing: they take memory.

        Half as many again as are needed, should the host be slower than it was when it was calibrated.
        """
        n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate = counts
        modes = block_modes(len(self.profile.blocks), n_swap, n_ckpt, n_ckpt_swap)
        swapped_bytes, runtime = self.memory.activations(modes).swapped_bytes, self.kinds[early_weights][1]
        most = self.most_early(n_persist, swapped_bytes, early_weights=early_weights)
        likely = min(most, n_speculate)
        times = times_by_early(runtime, modes, n_persist, n_buffer, most, likely=likely, tolerance=_NOTHING)
        limit_ms = min(times) * (1 + _NOTHING)
        needed = next(early for early, step_ms in enumerate(times) if step_ms <= limit_ms)
        enough = (early for early in range(min(most, -(-3 * needed // 2)), needed - 1, -1) if times[early] <= limit_ms)
        return n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, next(enough)

    def check_counts(
        self,
        n_persist: int,
        n_buffer: int,
        n_swap: int,
        n_ckpt: int,
        n_ckpt_swap: int,
        n_speculate: int,
        n_stream: int,
        *,
        early_weights: bool,
        n_whole: int,
    ) -> None:
        """ValueError for a count out of range."""
        n_chunks = len(self.layout.chunks)
        if not 0 <= n_persist <= n_chunks:
            raise ValueError(f"n_persist must be 0 to {n_chunks}, the number of chunks, not {n_persist}")
        least, most = self.memory.least_buffers(n_persist), self.memory.all_buffers(n_persist)
        if not least <= n_buffer <= most:
            raise ValueError(
                f"n_buffer must be {least} to {most} when {n_persist} of {n_chunks} chunks are persistent, not "
                f"{n_buffer}: a unit holds up to {least} non-persistent chunks at once"
            )
        if not 0 <= n_speculate <= n_chunks - n_persist:
            away = n_chunks - n_persist
            raise ValueError(f"n_speculate must be 0 to {away}, the number of chunks in host memory, not {n_speculate}")
        if n_speculate and self.in_backward:
            raise ValueError("n_speculate must be 0 with step_during_backward=True: no update waits for step() then")
        if n_whole and not early_weights:
            raise ValueError(f"n_whole must be 0 without early_weights, where early updates are whole, not {n_whole}")
        if not 0 <= n_whole < max(1, n_speculate):
            raise ValueError(
                f"n_whole must be 0 to {max(0, n_speculate - 1)}, fewer than the early updates, not {n_whole}: where "
                "all of them are to be whole, leave out early_weights"
            )
        candidates = self.runtime.streamable(n_persist, n_speculate)
        if not 0 <= n_stream <= candidates:
            raise ValueError(
                f"n_stream must be 0 to {candidates}, the number of chunks in host memory that are trained and not "
                f"updated early, not {n_stream}"
            )
        block_modes(len(self.profile.blocks), n_swap, n_ckpt, n_ckpt_swap)

    def check_fits(self, plan: Plan) -> None:
        """PlanError when ``plan`` needs more than there is."""
        activations = self.memory.activations(plan.block_modes)
        if plan.device_bytes > self.hardware.device_bytes:
            raise device_error(
                self.memory, plan.n_persist, plan.n_buffer, activations, n_stream=plan.n_stream, given=True
            )
        if plan.host_bytes > self.hardware.host_bytes:
            raise host_error(
                self.kinds[plan.early_weights][0],
                plan.n_persist,
                activations,
                n_speculate=plan.n_speculate,
                n_whole=plan.n_whole,
                given=True,
            )
