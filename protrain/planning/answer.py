"""Why a plan takes the time it takes: what each phase waits for, what each knob does, and what more memory would gain.

All numbers come from the models that the search uses. What a phase waits for is read from the simulated timeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from protrain.common.records import Record
from protrain.common.tables import WIDTH, aligned, format_bytes, format_change, format_ms, per_gpu, wrapped
from protrain.hardware.profile import HardwareProfile
from protrain.planning.fits import check
from protrain.planning.layout import updated_chunks
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import BlockMode, Plan, layout_of, offloaded_input_bytes
from protrain.planning.predict import Models, predict
from protrain.planning.ranges import Change, changes_of
from protrain.planning.rates import host_update_gparams, slower_share
from protrain.planning.search import search
from protrain.planning.timeline import HOST, WAITS, Phase, phases
from protrain.profiler.model_profile import ModelProfile

MORE = (0.05, 0.10, 0.25, 0.50, 1.00)  # how much more memory is tried, as shares of what there is
_SHOWN = 0.0005  # the smallest share that is printed as 0.1%
_SAME = 0.005  # times within this share count as the same, since the search has other criteria for plans so close


@dataclass(frozen=True, kw_only=True)
class Better(Record):
    """The fastest plan of a machine with more memory."""

    memory: str  # "device" or "host"
    more_bytes: int  # what the plan needs beyond what there is
    step_ms: float
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Explanation(Record):
    """What a plan takes, what limits it, and what would change that."""

    file_kind = "the explanation of a plan"

    plan: Plan  # with new predictions for this profile and machine
    slower_share: float  # of the host's calibrated rate, which plans are made for
    slower_ms: float  # of a step on that slower host
    tokens_per_s: float
    device_limit_bytes: int
    host_limit_bytes: int
    large_buffers: int  # beside the plan's n_buffer, for chunks of large parameters
    device_parts: dict[str, int]
    host_parts: dict[str, int]
    phases: tuple[Phase, ...]
    changes: tuple[Change, ...]
    here: Plan | None  # a faster plan that the search finds on this machine
    better: tuple[Better, ...]
    searched: bool  # whether plans for more memory were searched

    def table(self) -> str:
        """Everything as text."""
        tables = [self.memory_table(), self.phase_table(), self.knob_table()]
        tables += [self.better_table()] if self.searched else []
        step = f"{self.plan}: {format_ms(self.plan.step_ms)}, {self.tokens_per_s:,.0f} tokens/s"
        step += f"; {slower}" if (slower := self.on_slower_host()) else ""
        return "\n\n".join((wrapped(step, indent="  "), *tables))

    def on_slower_host(self) -> str:
        """The step time on the slower host that plans are made for, as text; "" if that is as fast as calibrated."""
        if not self._host_is_slower:
            return ""
        slower, calibrated = format_ms(self.slower_ms), format_ms(self.plan.step_ms)
        time = "the same" if slower == calibrated else slower
        return f"{time} should the host update {1 - self.slower_share:.0%} more slowly"

    @property
    def _host_is_slower(self) -> bool:
        return self.slower_share < 0.995  # by at least what is printed as 1%

    def __str__(self) -> str:
        return self.table()

    def memory_table(self) -> str:
        """Device and host memory by part."""
        rows = []
        for name, total, limit, parts in (
            ("device memory", self.plan.device_bytes, self.device_limit_bytes, self.device_parts),
            ("host memory", self.plan.host_bytes, self.host_limit_bytes, self.host_parts),
        ):
            rows.append([per_gpu(name, self.plan.world_size), format_bytes(total), f"of {format_bytes(limit)}"])
            rows += [[f"  {part}", format_bytes(size)] for part, size in parts.items()]
        return aligned(rows)

    def phase_table(self) -> str:
        """The phases, and what each of them waits for."""
        known = [name for name in WAITS.values() if all(name in phase.waits_ms for phase in self.phases)]
        waits = [name for name in known if any(phase.waits_ms[name] > 0 for phase in self.phases)]
        columns = [["phase", "time", "computing", *(f"waiting for {name}" for name in waits), "limited by"]]
        for phase in self.phases:
            parts = [phase.compute_ms, *(phase.waits_ms[name] for name in waits)]
            shares = [f"{part / phase.length_ms:.0%}" if phase.length_ms else "-" for part in parts]
            columns.append([phase.name, format_ms(phase.length_ms), *shares, phase.limit])
        return aligned(list(zip(*columns, strict=True)))

    def knob_table(self) -> str:
        """The effect of each knob, one more and one less."""
        slower = [f"host {1 - self.slower_share:.0%} slower"] if self._host_is_slower else []
        rows = [["one more or less", "step time", *slower, "device", "host", ""]]
        for change in self.changes:
            at = int(getattr(self.plan, change.knob))
            if at + change.step < 0:
                continue
            name = f"{change.knob} {at} -> {at + change.step}"
            if change.step_ms is None or change.slower_ms is None:
                rows.append([name, "-", *["-"] * len(slower), "-", "-", change.impossible])
                continue
            over = [
                f"{format_bytes(size)} too much {where} memory"
                for size, where in ((change.device_over_bytes, "device"), (change.host_over_bytes, "host"))
                if size
            ]
            rows.append(
                [
                    name,
                    f"{format_ms(change.step_ms)} ({format_change(change.step_ms, self.plan.step_ms)})",
                    *[format_change(change.slower_ms, self.slower_ms)] * len(slower),
                    _signed(change.device_bytes - self.plan.device_bytes),
                    _signed(change.host_bytes - self.plan.host_bytes),
                    f"infeasible: {', '.join(over)}" if over else self._not_taken(change),
                ]
            )
        return aligned(rows, WIDTH)

    def _not_taken(self, change: Change) -> str:
        """Why the search does not make ``change`` although it saves time, else ""."""
        saved = 1 - (change.slower_ms or self.slower_ms) / self.slower_ms
        if saved >= _SHOWN:
            return f"saves {saved:.1%} on a slower host, less than is asked of it"
        saved = 1 - (change.step_ms or self.plan.step_ms) / self.plan.step_ms
        return "saves nothing on the slower host that plans are made for" if saved >= _SHOWN else ""

    def better_table(self) -> str:
        """The faster plans that more memory would allow."""
        lines = []
        if self.here is not None:
            lines.append(f"as it is: {self._compared(self.here)}")
        for found in self.better:
            lines.append(
                f"with {format_bytes(found.more_bytes)} more {found.memory} memory: {self._compared(found.plan)}"
            )
        for memory in ("device", "host"):
            if not any(found.memory == memory for found in self.better):
                lines.append(f"up to twice the {memory} memory: no faster plan")
        return wrapped("\n".join(lines), indent="  ")

    def _compared(self, plan: Plan) -> str:
        return f"{format_ms(plan.step_ms)} ({format_change(plan.step_ms, self.plan.step_ms)}), {plan}"


def explain(
    plan: Plan,
    profile: ModelProfile,
    hardware: HardwareProfile,
    *,
    step_during_backward: bool = False,
    more_memory: bool = True,
) -> Explanation:
    """What limits ``plan`` for ``profile`` on ``hardware``, and what would change that.

    With ``more_memory`` it also searches plans for machines with more memory, which takes some seconds.

    Raises:
        ValueError: the plan was made for another model, or contradicts itself.
        PlanError: it does not fit ``hardware``.
    """
    plan = check(plan, profile, hardware, step_during_backward=step_during_backward)
    models = Models.of(plan, profile, hardware, step_during_backward=step_during_backward)
    modes, counts = plan.block_modes, plan.counts
    here, better = _with_more(plan, profile, hardware, step_during_backward) if more_memory else (None, [])
    return Explanation(
        plan=plan,
        tokens_per_s=plan.tokens_per_s,
        device_limit_bytes=hardware.device_bytes,
        host_limit_bytes=hardware.host_bytes,
        large_buffers=models.memory.large_buffers(plan.n_persist),
        device_parts=device_parts(plan, models.memory),
        host_parts=host_parts(plan, models.memory),
        slower_share=slower_share(hardware),
        slower_ms=models.slower_ms(modes, counts),
        phases=phases(models.runtime.timeline(modes, counts)),
        changes=tuple(changes_of(plan, profile, models)),
        here=here,
        better=tuple(better),
        searched=more_memory,
    )


def device_parts(plan: Plan, memory: MemoryModel) -> dict[str, int]:
    """The parts of the device memory of ``plan``."""
    parts = memory.static_parts(plan.n_persist, plan.n_buffer, plan.n_device_sum)
    parts["activations"] = memory.activations(plan.block_modes).peak_bytes
    return {**parts, "margin and workspaces": plan.device_bytes - sum(parts.values())}


def host_parts(plan: Plan, memory: MemoryModel) -> dict[str, int]:
    """The parts of the host memory of ``plan``."""
    away = memory.layout.chunks[plan.n_persist :]
    element = memory.profile.element_bytes
    # All states are what a second copy of all of them would take, and their weights what one of the weights would take.
    states, trained = (memory.copy_bytes(plan.n_persist, len(away), n_weights) for n_weights in (0, len(away)))
    sums = memory.host_sum_bytes(plan.n_persist, plan.n_device_sum)
    activations = memory.activations(plan.block_modes)
    offloaded = sum(
        offloaded_input_bytes(block)
        for block, mode in zip(memory.profile.blocks, plan.block_modes, strict=True)
        if mode is BlockMode.CKPT_SWAP
    )
    parts = {
        "weights": sum(memory.layout.shard_elements(chunk) * element for chunk in away),
        "gradients": memory.host_gradient_bytes(plan.n_persist, activations.swapped_bytes)
        + memory.sent_sum_bytes(plan.n_persist, plan.n_device_sum),
        "optimizer states": states - trained,
        "swapped activations": activations.swapped_bytes - offloaded,
    }
    if sums:
        parts["sums of gradients"] = sums
    if plan.n_ckpt_swap:
        parts["offloaded inputs of recomputed blocks" + (", and attention" if plan.keep_attention else "")] = offloaded
    if weights := memory.copy_bytes(plan.n_persist, plan.n_weight_only, plan.n_weight_only):
        parts["second weights for speculative updates"] = weights
    if whole := memory.copy_bytes(plan.n_persist, plan.n_speculate, plan.n_weight_only) - weights:
        parts["second copies for speculative updates"] = whole
    needed = memory.host_bytes(plan.counts, activations)
    return {**parts, "other": needed - sum(parts.values())}


def _with_more(
    plan: Plan, profile: ModelProfile, hardware: HardwareProfile, step_during_backward: bool
) -> tuple[Plan | None, list[Better]]:
    """A faster plan for the memory there is, and the fastest plans with more and more memory, if they are faster."""

    @cache
    def fastest(memory: str = "device_bytes", share: float = 0.0) -> Plan:
        grown: dict[str, Any] = {memory: int(getattr(hardware, memory) * (1 + share))}
        machine = replace(hardware, **grown)
        return search(profile, machine, chunk_elements=plan.chunk_elements, step_during_backward=step_during_backward)

    here = fastest()
    best_ms = min(here.step_ms, plan.step_ms)
    found = []
    for memory in ("device", "host"):
        size = f"{memory}_bytes"
        known_ms, most_ms = best_ms, fastest(size, MORE[-1]).step_ms
        for share in MORE:
            if most_ms >= known_ms * (1 - _SAME):
                break  # no amount of memory gains more
            better = fastest(size, share)
            if better.step_ms < known_ms * (1 - _SAME):
                known_ms = better.step_ms
                needed = getattr(better, size) - getattr(hardware, size)
                found.append(Better(memory=memory, more_bytes=needed, step_ms=known_ms, plan=better))
    return here if here.step_ms < plan.step_ms * (1 - _SAME) else None, found


def _signed(size: int) -> str:
    return "the same" if size == 0 else f"{'+' if size > 0 else '-'}{format_bytes(abs(size))}"


_WHOLE = ("update", "speculative update", "deferred update")


def host_gparams(
    plan: Plan, profile: ModelProfile, hardware: HardwareProfile, *, step_during_backward: bool = False
) -> float:
    """Predicted 1e9 parameters a second of the host's whole updates under ``plan``, 0 if it makes none."""
    layout = layout_of(profile, plan)
    if hardware.device_type == "cpu":  # on a CPU nothing runs beside the updates
        is_any_away = any(chunk >= plan.n_persist for chunk in updated_chunks(profile, layout))
        return host_update_gparams(profile, hardware) if is_any_away else 0.0
    elements, milliseconds = 0, 0.0
    timeline = predict(profile, hardware, plan, step_during_backward=step_during_backward).timeline
    for operation in timeline.operations:
        kind, _, chunk = operation.name.rpartition(" ")
        if operation.lane == HOST and kind in _WHOLE:
            elements += layout.shard_elements(layout.chunks[int(chunk)])
            milliseconds += operation.end_ms - operation.start_ms
    return elements / milliseconds / 1e6 if milliseconds else 0.0
