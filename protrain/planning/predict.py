"""Predictions: from a profile, a machine and a plan to time, memory and timeline.

``Models`` keeps what the plans of one layout have in common, as the search and the what-if table ask about many plans.
"""

from __future__ import annotations

from functools import cache
from math import inf

from protrain.hardware.profile import HardwareProfile
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import Counts, Modes, Plan, as_planned, block_modes, fingerprint, layout_of
from protrain.planning.rates import slower_share
from protrain.planning.simulate import Run, timeline
from protrain.planning.step import Steps
from protrain.planning.timeline import HOST, Timeline
from protrain.profiler.model_profile import ModelProfile

# The share of steps that plans expect to be clipped: fewer than in the fine-tune of bench/results/h200/NOTES.md, where
# 38 of 100 logged norms were above the limit, since steps that are not clipped should hardly be longer.
CLIPPED = 0.05


def host_gparams(plan: Plan, profile: ModelProfile, hardware: HardwareProfile) -> float:
    """Predicted 1e9 parameters a second of the host's whole updates under ``plan``, 0 if it makes none."""
    models = Models.of(plan, profile, hardware)
    layout, timeline = models.layout, models.timeline(plan.block_modes, plan.counts)
    on_host = [operation for operation in timeline.operations if operation.lane == HOST]
    updates = [operation for operation in on_host if not operation.name.startswith("speculative weight")]
    elements = sum(layout.shard_elements(layout.chunks[int(update.name.split()[-1])]) for update in updates)
    return elements / max(1e-9, sum(update.end_ms - update.start_ms for update in updates)) / 1e6


class Models:
    """Predictions for the plans of one layout on one machine.

    ``memory`` says what they take, ``steps`` what their steps do, and this class how long that takes (paper section 4,
    and beyond). On a CPU nothing overlaps, and the operations of a step add up.
    """

    def __init__(self, memory: MemoryModel) -> None:
        self.memory, self.steps = memory, Steps(memory)
        self.profile, self.hardware, self.layout = memory.profile, memory.hardware, memory.layout
        self.n_chunks, self.n_blocks = len(self.layout.chunks), len(self.profile.blocks)
        self.keep_attention = not all(block.recomputes_attention for block in self.profile.blocks)
        # The forwards and backwards before the last one of a step: see [Note: several batches].
        self._n_before = self.profile.accumulation - 1
        self._before_ms = cache(self._before_ms_of)
        self._unspeculated_ms = cache(self.slower_ms)

    @classmethod
    def of(cls, plan: Plan, profile: ModelProfile, hardware: HardwareProfile) -> Models:
        """The models of ``plan``'s layout and options."""
        profile, layout = as_planned(profile, plan), layout_of(profile, plan)
        return cls(MemoryModel(profile, hardware, layout, pack_swaps=plan.pack_swaps, stream=plan.stream))

    def modes(self, counts: Counts) -> Modes:
        """The block modes of ``counts``."""
        return block_modes(self.n_blocks, counts.n_swap, counts.n_ckpt, counts.n_ckpt_swap)

    def step_ms(self, modes: Modes, counts: Counts, *, host_share: float = 1.0, limit_ms: float = inf) -> float:
        """Predicted milliseconds of one step in steady state; infinite if the GPU alone takes ``limit_ms``.

        The host updates at ``host_share`` of its calibrated rate. The step's gradients are not clipped, so no
        speculative update is redone.
        """
        before_ms = self._before_ms(modes, counts._replace(n_speculate=0, n_weight_only=0))
        if before_ms + self.steps.gpu_ms(modes, counts) >= limit_ms:
            return inf
        return before_ms + Run(self.steps, modes, counts, host_share).step_ms

    def _before_ms_of(self, modes: Modes, counts: Counts) -> float:
        return self._n_before * Run(self.steps, modes, counts, only_adds=True).step_ms if self._n_before else 0.0

    def timeline(self, modes: Modes, counts: Counts) -> Timeline:
        """What runs where and when in that step, or in its last forward and backward if it has several batches."""
        return timeline(Run(self.steps, modes, counts))

    def slower_ms(self, modes: Modes, counts: Counts, *, limit_ms: float = inf) -> float:
        """``step_ms`` on the slower host that plans are made for."""
        return self.step_ms(modes, counts, host_share=slower_share(self.hardware), limit_ms=limit_ms)

    def judged_ms(self, modes: Modes, counts: Counts, *, limit_ms: float = inf) -> float:
        """The mean of ``slower_ms`` over steps of which a few are clipped, or infinite as ``slower_ms`` is.

        A clipped step makes all updates once its norm is known, so it is taken to be as long as one without speculative
        updates.
        """
        step_ms = self.slower_ms(modes, counts, limit_ms=limit_ms)
        if not counts.n_speculate or step_ms >= limit_ms:
            return step_ms
        clipped_ms = self._unspeculated_ms(modes, counts._replace(n_speculate=0, n_weight_only=0))
        return (1 - CLIPPED) * step_ms + CLIPPED * clipped_ms

    def plan(self, counts: Counts, modes: Modes | None = None) -> Plan:
        """The plan of ``counts`` with its predictions. ``modes`` are given if they differ from the usual order."""
        profile, memory = self.profile, self.memory
        modes = self.modes(counts) if modes is None else modes
        activations = memory.activations(modes)
        return Plan(
            **counts._asdict(),
            chunk_elements=self.layout.chunk_elements,
            n_chunks=self.n_chunks,
            world_size=self.layout.world_size,
            block_modes=modes,
            model=fingerprint(profile),
            tokens=profile.tokens,
            accumulation=profile.accumulation,
            moment_dtype=profile.moment_dtype,
            chunked_loss=profile.chunked_loss,
            device_bytes=memory.device_bytes(counts, modes),
            host_bytes=memory.host_bytes(counts, modes),
            keep_attention=self.keep_attention,
            n_device_gradient=memory.gradients.n_on_device(counts.n_persist),
            n_host_gradient=memory.n_host_regions(counts.n_persist, activations.swapped_bytes),
            pack_swaps=memory.pack_swaps,
            stream=memory.stream,
            step_ms=self.step_ms(modes, counts),
            transient_bytes=activations.peak_bytes - activations.held_bytes,
        )
