"""What turning each knob of a plan by one would do, to time and memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from protrain.common.records import Record
from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import layouts
from protrain.planning.memory.model import MemoryModel
from protrain.planning.plan import Plan, as_planned, block_modes, layout_of
from protrain.planning.rates.caution import cautious
from protrain.planning.runtime.model import RuntimeModel
from protrain.profiler.model_profile import ModelProfile

KNOBS = ("n_persist", "n_buffer", "n_swap", "n_ckpt", "n_ckpt_swap", "n_speculate", "n_stream", "n_whole")


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """One knob turned by one, all others as they are.

    Where a number of buffers, early or streamed updates makes no sense beside the new number of persistent chunks, one
    of streamed updates beside that of early ones, or one of moved inputs beside the new number of recomputed blocks,
    the nearest that does is taken.
    """

    knob: str
    step: int  # 1 or -1
    counts: tuple[int, ...]  # in the order of KNOBS
    impossible: str = ""  # why there is no such plan; then all that follows is missing
    step_ms: float | None = None
    cautious_ms: float | None = None  # of a step with the slowest host that plans reckon with
    device_bytes: int = 0
    host_bytes: int = 0
    device_over_bytes: int = 0  # more than there is; 0: fits
    host_over_bytes: int = 0


class PlanModels:
    """The models of one plan: on the machine, and with the slowest host that plans reckon with ([Note: caution])."""

    def __init__(
        self,
        plan: Plan,
        profile: ModelProfile,
        hardware: HardwareProfile,
        *,
        step_during_backward: bool,
    ) -> None:
        self.memory = MemoryModel(
            as_planned(profile, plan),
            hardware,
            layout_of(profile, plan),
            update_in_backward=step_during_backward,
            early_weights=plan.early_weights,
            pack_swaps=plan.pack_swaps,
        )
        self.runtime = RuntimeModel(self.memory)

    @functools.cached_property
    def slower(self) -> RuntimeModel:
        """Of the machine with that host."""
        memory = copy.copy(self.memory)
        memory.hardware = cautious(memory.hardware)
        return RuntimeModel(memory)


def changes_of(plan: Plan, profile: ModelProfile, hardware: HardwareProfile, models: PlanModels) -> Iterator[Change]:
    """Every knob of ``plan`` turned by one either way, and each switch."""
    yield from _turned(plan, models)
    yield from _switches(plan, profile, hardware, models)


def _turned(plan: Plan, models: PlanModels) -> Iterator[Change]:
    n_chunks, n_blocks = plan.n_chunks, len(plan.block_modes)
    for knob in KNOBS:
        for step in (1, -1):
            counts = {name: getattr(plan, name) + (step if name == knob else 0) for name in KNOBS}
            impossible = _impossible(counts, knob, n_chunks, n_blocks, models.runtime)
            if not impossible:
                wanted = counts[knob]
                _make_possible(counts, models)
                if knob == "n_buffer" and wanted < counts[knob]:
                    impossible = f"a unit holds up to {counts[knob]} non-persistent chunks at once"
                elif knob == "n_buffer" and wanted > counts[knob]:
                    impossible = "every non-persistent chunk has a buffer"
                elif knob == "n_stream" and wanted > counts[knob]:
                    impossible = "the device updates every chunk in host memory that is not updated early"
            change = Change(
                knob=knob,
                step=step,
                counts=tuple(counts.values()),
                impossible=impossible,
            )
            yield change if impossible else _effect(change, plan, models)


def _make_possible(counts: dict[str, int], models: PlanModels) -> None:
    """Bring what n_persist, n_ckpt and the layout set limits to within them."""
    memory, n_persist = models.memory, counts["n_persist"]
    least, most = memory.least_buffers(n_persist), memory.all_buffers(n_persist)
    counts["n_buffer"] = min(max(counts["n_buffer"], least), most)
    counts["n_speculate"] = min(counts["n_speculate"], len(memory.layout.chunks) - n_persist)
    counts["n_stream"] = min(counts["n_stream"], models.runtime.streamable(n_persist, counts["n_speculate"]))
    counts["n_ckpt_swap"] = min(counts["n_ckpt_swap"], counts["n_ckpt"])
    counts["n_whole"] = min(counts["n_whole"], max(0, counts["n_speculate"] - 1)) if memory.early_weights else 0


def _effect(change: Change, plan: Plan, models: PlanModels) -> Change:
    memory = models.memory
    n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_stream, n_whole = change.counts
    modes = plan.block_modes
    if change.knob in ("n_swap", "n_ckpt", "n_ckpt_swap"):
        modes = block_modes(len(modes), n_swap, n_ckpt, n_ckpt_swap)
    activations = memory.activations(modes)
    device_bytes = memory.device_bytes(n_persist, n_buffer, activations, n_stream)
    host_bytes = memory.host_bytes(n_persist, activations, n_speculate, n_whole)
    counts = n_persist, n_buffer, n_speculate, n_stream, n_whole
    return replace(
        change,
        step_ms=models.runtime.step_ms(modes, *counts),
        cautious_ms=models.slower.step_ms(modes, *counts),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        device_over_bytes=max(0, device_bytes - memory.hardware.device_bytes),
        host_over_bytes=max(0, host_bytes - memory.hardware.host_bytes),
    )


def _switches(plan: Plan, profile: ModelProfile, hardware: HardwareProfile, models: PlanModels) -> Iterator[Change]:
    """What the plan does not do: keep attention or compute it again, other early updates, the other order of chunks."""
    impossible = "" if plan.n_ckpt else "no block is recomputed"
    if not any(block.attention_bytes for block in profile.blocks):
        impossible = "no block has a fused attention"
    yield _switched("keep_attention", impossible, plan, profile, hardware, models)
    yield _switched("early_weights", "" if plan.n_speculate else "no update is early", plan, profile, hardware, models)
    if len(layouts(profile, plan.chunk_elements)) > 1:
        yield _switched("large_first", "", plan, profile, hardware, models)


def _switched(
    knob: str, impossible: str, plan: Plan, profile: ModelProfile, hardware: HardwareProfile, models: PlanModels
) -> Change:
    change = Change(
        knob=knob,
        step=-1 if getattr(plan, knob) else 1,
        counts=tuple(getattr(plan, name) for name in KNOBS),
        impossible=impossible,
    )
    if impossible:
        return change
    changed: dict[str, Any] = {knob: not getattr(plan, knob)}
    other = replace(plan, **changed)
    others = PlanModels(other, profile, hardware, step_during_backward=models.memory.update_in_backward)
    counts = dict(zip(KNOBS, change.counts, strict=True))
    _make_possible(counts, others)
    return _effect(replace(change, counts=tuple(counts.values())), plan, others)


def _impossible(counts: dict[str, int], knob: str, n_chunks: int, n_blocks: int, runtime: RuntimeModel) -> str:
    """Why there is no such number; "" when there is."""
    if counts[knob] < 0:
        return "there is none to give up"
    if counts["n_persist"] > n_chunks:
        return "all chunks are persistent"
    if knob == "n_speculate" and not runtime.speculates:
        return "no update waits for step()"
    if knob == "n_speculate" and counts["n_speculate"] > n_chunks - counts["n_persist"]:
        return "every chunk in host memory is updated early"
    if knob == "n_whole" and not (runtime.early_weights and counts["n_speculate"]):
        return "every early update is whole" if counts["n_speculate"] else "no update is early"
    if knob == "n_whole" and counts["n_whole"] == counts["n_speculate"]:
        return "none would be of a weight alone"
    if counts["n_swap"] + counts["n_ckpt"] > n_blocks:
        return "every block is swapped or checkpointed"
    if knob == "n_ckpt_swap" and counts["n_ckpt_swap"] > counts["n_ckpt"]:
        return "the inputs of every recomputed block move" if counts["n_ckpt"] else "no block is recomputed"
    return ""
