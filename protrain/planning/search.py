"""The search: the integers that make a step fastest within the memory there is (paper section 4).

It leaves nothing out that could win (:mod:`protrain.planning.columns`), but for streamed updates, which are looked for
where they are likely to.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from protrain.hardware.profile import HardwareProfile
from protrain.planning.columns import MUST_GAIN, Candidate, Columns
from protrain.planning.infeasible import device_error, host_error, nothing_fits
from protrain.planning.layout import Layout, choose_chunk_elements, pack
from protrain.planning.memory import MemoryModel
from protrain.planning.moves import Moves
from protrain.planning.plan import BlockMode, Plan, block_modes
from protrain.planning.runtime import RuntimeModel
from protrain.profiler.model_profile import ModelProfile

# Of plans within this of the fastest, the one with most persistent chunks, then fewest swapped blocks and then fewest
# moved inputs wins: what is not moved cannot be late.
_TOLERANCE = 0.005
_NEAR = 0.03  # of plans within this of the fastest other numbers of early updates are tried
_NOTHING = 0.001  # what early updates must save at least
_PARTS = 4  # of all early updates: where to begin looking when others may be streamed
_CLIMBED = 3  # of the fastest plans: those for which numbers of early and streamed updates are looked for together
_TURNS = ((0, -1), (0, 1), (-1, 1), (1, -1), (-1, 0), (1, 0))  # of the numbers of early and of streamed updates

# n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_stream
Counts = tuple[int, int, int, int, int, int, int]


def search(
    profile: ModelProfile,
    hardware: HardwareProfile,
    *,
    chunk_elements: int | None = None,
    step_during_backward: bool = False,
) -> Plan:
    """The fastest plan for ``profile`` on ``hardware``, within 1%: see _TOLERANCE and Columns.

    Where a device that updates chunks in host memory makes it faster still, that plan: as a rule the fastest of those.

    Args:
        profile: of the model and the batch.
        hardware: the machine; its ``device_bytes`` and ``host_bytes`` are the limits.
        chunk_elements: size of a chunk; default: the size that wastes least.
        step_during_backward: plan for updates inside backward.

    Raises:
        PlanError: nothing fits; it says what is needed, what is there, and the smallest change that fits.
        ValueError: ``chunk_elements`` does not suit the model.
    """
    models = _Models(profile, hardware, chunk_elements, step_during_backward)
    plan = models.fastest()
    if plan is None:
        raise nothing_fits(models.memory, models.moves)
    return plan


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
    n_stream: int = 0,
    chunk_elements: int | None = None,
    step_during_backward: bool = False,
) -> Plan:
    """The plan of these integers, with its predictions: how to make a plan by hand.

    Raises:
        ValueError: a count is out of range; the message says the range.
        PlanError: the plan does not fit ``hardware``.
    """
    models = _Models(profile, hardware, chunk_elements, step_during_backward)
    counts = n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_stream
    models.check_counts(*counts)
    plan = models.plan(*counts)
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
    models = _Models(profile, hardware, plan.chunk_elements, step_during_backward)
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
    models.check_counts(*counts)
    fresh = models.plan(*counts, modes=plan.block_modes)
    models.check_fits(fresh)
    return fresh


def fingerprint(profile: ModelProfile) -> str:
    """What a plan is valid for: parameters, their shapes and optimizer groups, units, blocks, dtype; not the batch."""
    facts = {
        "dtype": profile.dtype,
        "parameters": [(record.name, record.shape, record.group) for record in profile.parameters],
        "units": [(unit.name, unit.block, unit.parameters) for unit in profile.units],
        "blocks": [block.name for block in profile.blocks],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class _Models:
    """Layout, memory model and runtime model of one search."""

    def __init__(
        self, profile: ModelProfile, hardware: HardwareProfile, chunk_elements: int | None, step_during_backward: bool
    ) -> None:
        self.profile = profile
        self.hardware = hardware
        self.in_backward = step_during_backward
        self.layout: Layout = pack(profile, chunk_elements or choose_chunk_elements(profile))
        self.memory = MemoryModel(profile, hardware, self.layout)
        self.moves = Moves(self.memory)
        self.runtime = RuntimeModel(profile, hardware, self.layout, update_in_backward=step_during_backward)

    def plan(
        self,
        n_persist: int,
        n_buffer: int,
        n_swap: int,
        n_ckpt: int,
        n_ckpt_swap: int,
        n_speculate: int,
        n_stream: int,
        *,
        modes: tuple[BlockMode, ...] | None = None,
    ) -> Plan:
        """The plan with its predictions."""
        profile, memory = self.profile, self.memory
        modes = modes or block_modes(len(profile.blocks), n_swap, n_ckpt, n_ckpt_swap)
        activations = memory.activations(modes)
        return Plan(
            n_persist=n_persist,
            n_buffer=n_buffer,
            n_swap=n_swap,
            n_ckpt=n_ckpt,
            chunk_elements=self.layout.chunk_elements,
            n_chunks=len(self.layout.chunks),
            block_modes=modes,
            model=fingerprint(profile),
            tokens=profile.tokens,
            device_bytes=memory.device_bytes(n_persist, n_buffer, activations, n_stream),
            host_bytes=memory.host_bytes(n_persist, activations, n_speculate),
            n_ckpt_swap=n_ckpt_swap,
            n_speculate=n_speculate,
            n_stream=n_stream,
            step_ms=self.runtime.step_ms(modes, n_persist, n_buffer, n_speculate, n_stream),
            transient_bytes=activations.peak_bytes - activations.held_bytes,
        )

    def fastest(self) -> Plan | None:
        """The fastest plan; None when none fits.

        Placements that are good without streamed updates are with them as well, as a rule, and leave little to find.
        """
        models = self.profile, self.hardware, self.memory, self.runtime, self.moves
        found = Columns(*models, tolerance=_TOLERANCE).walk()
        if not found:
            return None
        near_ms = min(found)[0] * (1 + _NEAR)
        found = [self.refined(candidate) for candidate in found if candidate.step_ms <= near_ms]
        plan = self._chosen(found)
        if not self.runtime.streams:
            return plan
        streamed = [self.climbed(one) for one in map(self.streamed, sorted(found)[:_CLIMBED]) if one is not None]
        streamed = [one for one in streamed if one.n_stream and one.step_ms < plan.step_ms * (1 - MUST_GAIN)]
        fastest_ms = min([plan.step_ms, *(one.step_ms for one in streamed)])
        others = Columns(*models, tolerance=_TOLERANCE, streams=True, fastest_ms=fastest_ms).walk()
        streamed = [self.climbed(one) for one in sorted([*streamed, *others])[:_CLIMBED]]
        return min(plan, self._chosen(streamed), key=lambda one: one.step_ms) if streamed else plan

    def _chosen(self, found: list[Candidate]) -> Plan:
        limit_ms = min(found)[0] * (1 + _TOLERANCE)
        close = [candidate for candidate in found if candidate.step_ms <= limit_ms]
        chosen = min(
            close, key=lambda candidate: (-candidate.n_persist, candidate.n_swap, candidate.n_ckpt_swap, candidate)
        )
        counts = self.more_persistent(chosen, limit_ms)
        return self.plan(*self.best_early(*self.fewer_moved(*counts, limit_ms)))

    def streamed(self, plan: Candidate) -> Candidate | None:
        """``plan`` with streamed updates if that is faster, and with the buffers for which they leave room.

        None when they leave too few.
        """
        memory = self.memory
        modes = block_modes(len(self.profile.blocks), plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
        activations = memory.activations(modes)
        most = self.most_early(plan.n_persist, activations.swapped_bytes)
        fit = int(memory.most_buffers(plan.n_persist, np.array(memory.margined_bytes(activations)), 1))
        if fit < 0:
            return None
        plan = plan._replace(n_buffer=min(plan.n_buffer, fit))
        found = self.runtime.fitted_ms(modes, plan.n_persist, plan.n_buffer, most, streams=True, limit_ms=plan.step_ms)
        step_ms, n_speculate, n_stream = found
        if step_ms >= plan.step_ms:
            return plan
        return plan._replace(step_ms=step_ms, n_speculate=n_speculate, n_stream=n_stream)

    def more_persistent(self, plan: Candidate, limit_ms: float) -> Counts:
        """The plan with most persistent chunks that fits and takes at most ``limit_ms``; ``plan`` does."""
        memory, n_chunks = self.memory, len(self.layout.chunks)
        modes = block_modes(len(self.profile.blocks), plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
        activations = memory.activations(modes)
        margined_bytes = np.array(memory.margined_bytes(activations))
        for more in range(n_chunks, plan.n_persist, -1):
            buffers = int(memory.most_buffers(more, margined_bytes, plan.n_stream))
            if buffers < 0:
                continue
            most_early = self.most_early(more, activations.swapped_bytes)
            step_ms, early, stream = self.runtime.fitted_ms(
                modes, more, buffers, most_early, streams=plan.n_stream > 0, limit_ms=limit_ms
            )
            if step_ms < limit_ms:
                return more, buffers, plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap, early, stream
        return plan[1:]

    def fewer_moved(
        self,
        n_persist: int,
        n_buffer: int,
        n_swap: int,
        n_ckpt: int,
        n_ckpt_swap: int,
        n_speculate: int,
        n_stream: int,
        limit_ms: float,
    ) -> Counts:
        """The same with the fewest moved inputs, and the buffers that then fit, that take at most ``limit_ms``.

        With streamed updates, for which there is room beside these buffers, as it is.
        """
        rooms = self.moves.rooms(n_swap, n_ckpt, n_persist) if n_ckpt_swap and not n_stream else []
        for fewer, buffers, swapped_bytes in rooms:
            if fewer >= n_ckpt_swap:
                break
            modes = block_modes(len(self.profile.blocks), n_swap, n_ckpt, fewer)
            most_early = self.most_early(n_persist, swapped_bytes)
            step_ms, early, _ = self.runtime.fitted_ms(modes, n_persist, buffers, most_early, limit_ms=limit_ms)
            if step_ms < limit_ms:
                return n_persist, buffers, n_swap, n_ckpt, fewer, early, 0
        return n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_stream

    def most_early(self, n_persist: int, swapped_bytes: int) -> int:
        """Early updates that host memory has room for."""
        if not self.runtime.speculates:
            return 0
        return int(self.memory.most_speculated(n_persist, np.array(swapped_bytes)))

    def refined(self, plan: Candidate) -> Candidate:
        """The same with none, all or one more or less of the early updates where that is faster.

        The simulation chooses their number by waits alone; they also slow down what runs beside them.
        """
        modes = block_modes(len(self.profile.blocks), plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
        most = self.most_early(plan.n_persist, self.memory.activations(modes).swapped_bytes)
        best = plan
        for early in sorted({0, most, max(0, plan.n_speculate - 1), min(most, plan.n_speculate + 1)}):
            best = self._better(best, modes, early, 0)
        return best

    def climbed(self, plan: Candidate) -> Candidate:
        """The same with the numbers of early and streamed updates from where no small change of both is faster."""
        modes = block_modes(len(self.profile.blocks), plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
        most = self.most_early(plan.n_persist, self.memory.activations(modes).swapped_bytes)
        best = plan
        for early in {most * part // _PARTS for part in range(_PARTS + 1)}:
            best = self._better(best, modes, early, self.runtime.balanced(plan.n_persist, early))
        size = 1 + most // (2 * _PARTS)
        while size and best.n_stream:
            before = best
            for early, stream in _TURNS:
                turned = best.n_speculate + size * early, best.n_stream + stream
                if 0 <= turned[0] <= most and turned[1] > 0:
                    best = self._better(best, modes, *turned)
            if best == before:
                size //= 2
        return best

    def _better(self, plan: Candidate, modes: tuple[BlockMode, ...], n_speculate: int, n_stream: int) -> Candidate:
        """``plan`` with these numbers of early and streamed updates, or as many as there may be, if that is faster."""
        n_stream = min(n_stream, self.runtime.streamable(plan.n_persist, n_speculate))
        counts = plan.n_persist, plan.n_buffer, n_speculate, n_stream
        step_ms = self.runtime.step_ms(modes, *counts, limit_ms=plan.step_ms)
        if step_ms >= plan.step_ms:
            return plan
        return plan._replace(step_ms=step_ms, n_speculate=n_speculate, n_stream=n_stream)

    def best_early(
        self,
        n_persist: int,
        n_buffer: int,
        n_swap: int,
        n_ckpt: int,
        n_ckpt_swap: int,
        n_speculate: int,
        n_stream: int,
    ) -> Counts:
        """The same with the best number of early updates, or fewer where those save nothing: they take memory.

        Half as many again as are needed, should the host be slower than it was when it was calibrated.
        """
        modes = block_modes(len(self.profile.blocks), n_swap, n_ckpt, n_ckpt_swap)
        most = self.most_early(n_persist, self.memory.activations(modes).swapped_bytes)
        streamed = [min(n_stream, self.runtime.streamable(n_persist, early)) for early in range(most + 1)]
        times = [self.runtime.step_ms(modes, n_persist, n_buffer, *both) for both in enumerate(streamed)]
        limit_ms = min(times) * (1 + _NOTHING)
        needed = next(early for early, step_ms in enumerate(times) if step_ms <= limit_ms)
        enough = (early for early in range(min(most, -(-3 * needed // 2)), needed - 1, -1) if times[early] <= limit_ms)
        early = next(enough)
        return n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, early, streamed[early]

    def check_counts(
        self,
        n_persist: int,
        n_buffer: int,
        n_swap: int,
        n_ckpt: int,
        n_ckpt_swap: int,
        n_speculate: int,
        n_stream: int,
    ) -> None:
        """ValueError for a count out of range."""
        n_chunks = len(self.layout.chunks)
        if not 0 <= n_persist <= n_chunks:
            raise ValueError(f"n_persist must be 0 to {n_chunks}, the number of chunks, not {n_persist}")
        least, most = self.memory.least_buffers(n_persist), n_chunks - n_persist
        if not least <= n_buffer <= most:
            raise ValueError(
                f"n_buffer must be {least} to {most} when {n_persist} of {n_chunks} chunks are persistent, not "
                f"{n_buffer}: a unit holds up to {least} non-persistent chunks at once"
            )
        if not 0 <= n_speculate <= most:
            raise ValueError(f"n_speculate must be 0 to {most}, the number of chunks in host memory, not {n_speculate}")
        if n_speculate and self.in_backward:
            raise ValueError("n_speculate must be 0 with step_during_backward=True: no update waits for step() then")
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
            raise device_error(self.memory, plan.n_persist, plan.n_buffer, activations, n_stream=plan.n_stream)
        if plan.host_bytes > self.hardware.host_bytes:
            raise host_error(self.memory, plan.n_persist, activations, n_speculate=plan.n_speculate)
