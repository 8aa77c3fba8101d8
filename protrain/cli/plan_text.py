"""A plan in words, and one step as text.

A step has a lane a line, in columns of equal time, darker where the lane works more.
"""

from __future__ import annotations

import shutil
import sys

from protrain.common.tables import WIDTH, aligned, format_bytes, format_change, format_ms, per_gpu
from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, Explanation, Plan
from protrain.planning.timeline import Timeline
from protrain.profiler.model_profile import ModelProfile

_LEAST_COLUMNS = 20
_SHADES = " ░▒▓█"
_PLAIN_SHADES = " .:+#"
_PHASES = ("forward", "backward", "after")
_SHORT = 0.02  # of a step: what limits a phase of less is of no interest


def summary_text(
    why: Explanation, profile: ModelProfile, hardware: HardwareProfile, *, updates_in_backward: bool
) -> str:
    """What a reader who stops after ten lines should know of ``why.plan``."""
    plan = why.plan
    device = "GPU" if hardware.device_type == "cuda" else "device"
    estimated = profile.device != hardware.device_type
    basis = "estimated from counted operations, not measured" if estimated else "predicted"
    slower = why.on_slower_host()
    rows = [
        ["step", f"{format_ms(plan.step_ms)}, {plan.tokens_per_s:,.0f} tokens/s ({basis}){slower and '; '}{slower}"],
        [f"{device} memory", f"{format_bytes(plan.device_bytes)} of {format_bytes(why.device_limit_bytes)}"],
        [
            per_gpu("host memory", plan.world_size),
            f"{format_bytes(plan.host_bytes)} of {format_bytes(why.host_limit_bytes)}",
        ],
        ["collectives", _collectives(hardware) if plan.world_size > 1 else ""],
        ["model states", _states(plan, why.large_buffers, device)],
        ["updates", _updates(plan, device, updates_in_backward)],
        ["activations", _activations(plan)],
        ["limited by", _limits(why, device)],
        ["step time", _more(why)],
        ["plan", str(plan)],
    ]
    return aligned([row for row in rows if row[1]], WIDTH)


def _collectives(hardware: HardwareProfile) -> str:
    """What each GPU receives in gathers and reductions, how fast it computes meanwhile, and how that is known."""
    said = [
        f"{what} {rate_gbps or link_gbps:.3g} GB/s ({hardware.known(name)})"
        for what, name, rate_gbps, link_gbps in (
            ("gathers", "all_gather_gbps", hardware.all_gather_gbps, hardware.h2d_gbps),
            ("reductions", "all_to_all_gbps", hardware.all_to_all_gbps, hardware.d2h_gbps),
        )
    ]
    if (kept := hardware.share("matmul", ["collective"])) < 1:
        known = "measured" if hardware.source == "measured" else "composed"
        said.append(f"computing beside them {kept:.0%} ({known})")
    return ", ".join(said)


def _states(plan: Plan, n_large: int, device: str) -> str:
    """Where the states are, of several GPUs their shards, and through what the other weights pass."""
    away = plan.n_chunks - plan.n_persist
    chunks, buffers = _counted(plan.n_chunks, "chunk"), _buffers(plan, n_large)
    here = f"{plan.n_persist} of {chunks}" if away else f"all {chunks}"
    if plan.world_size > 1:
        others = f", those of the other{f' {away}' * (away > 1)} in host memory" if away else ""
        whole = "stay in" if plan.n_buffer + n_large >= plan.n_chunks else "pass through"
        return f"shards of {here} on each {device}{others}; whole weights {whole} {buffers} of each"
    if not away:
        return f"{here} on the {device}"
    others = f"the weights of the other {away} pass" if away > 1 else "the weight of the other passes"
    return f"{here} on the {device}; {others} from host memory through {buffers}"


def _buffers(plan: Plan, n_large: int) -> str:
    buffers = [_counted(plan.n_buffer, "buffer")] if plan.n_buffer else []
    buffers += [_counted(n_large, "large one" if buffers else "large buffer")] if n_large else []
    return " and ".join(buffers)


def _updates(plan: Plan, device: str, in_backward: bool) -> str:
    parts = ["inside backward"] if in_backward else []
    if plan.n_speculate:
        alone = ""
        if plan.n_weight_only:
            some = plan.n_weight_only < plan.n_speculate
            alone = f", of {plan.n_weight_only} of them the weights alone" if some else ", of the weights alone"
        parts.append(f"the host does {_counted(plan.n_speculate, 'chunk')} before the norm is known{alone}")
    if plan.stream and plan.n_persist + plan.n_speculate < plan.n_chunks:
        parts.append(f"the {device} helps when the host is late")
    return "; ".join(parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _activations(plan: Plan) -> str:
    modes = plan.block_modes
    kept = sum(mode is BlockMode.NONE for mode in modes)
    moved = sum(mode is BlockMode.SWAP for mode in modes)
    parts = [f"{kept} keep theirs"] if kept else []
    if moved:
        parts.append(f"{moved} move them to host memory")
    if plan.n_ckpt:
        more = [f"{plan.n_ckpt_swap} of these from inputs in host memory"] if plan.n_ckpt_swap else []
        more += ["what attention put out is kept"] if plan.keep_attention else []
        parts.append(f"{plan.n_ckpt} recompute them" + (f" ({', '.join(more)})" if more else ""))
    return f"of {len(modes)} blocks {', '.join(parts)}" if parts else ""


def _limits(why: Explanation, device: str) -> str:
    whole_ms = sum(phase.length_ms for phase in why.phases)
    long = [phase for phase in why.phases if phase.length_ms > _SHORT * whole_ms]
    shares = [f"{phase.name} ({phase.length_ms / whole_ms:.0%}) by {phase.limit}" for phase in long]
    limits = {phase.limit for phase in long}
    computing = sum(phase.compute_ms for phase in why.phases) / whole_ms
    by = limits.pop() if len(limits) == 1 else ", ".join(shares)
    return f"{by}; the {device} computes {computing:.0%} of the step"


def _more(why: Explanation) -> str:
    """The fastest plan with up to twice the memory of either kind; "" where it was not searched."""
    if not why.searched:
        return ""

    def gain(faster: Plan) -> str:
        return format_change(faster.step_ms, why.plan.step_ms)

    found = [f"{gain(why.here)} as it is"] if why.here is not None else []
    for memory in ("device", "host"):
        of_kind = [better for better in why.better if better.memory == memory]
        for better in of_kind[:1] + of_kind[1:][-1:]:  # the least that helps, and what helps most
            found.append(f"{gain(better.plan)} with {format_bytes(better.more_bytes)} more {memory} memory")
    return ", ".join(found) or "no faster plan with up to twice of either"


def timeline_text(timeline: Timeline, *, plain: bool | None = None) -> str:
    """Ruler, lanes with the share of the step that each works, and the phases; as wide as the terminal, at most 80.

    Args:
        timeline: one step.
        plain: ASCII alone; default: when standard output cannot show block characters.
    """
    if plain is None:
        plain = not _shows_blocks()
    shades = _PLAIN_SHADES if plain else _SHADES
    width = max(map(len, timeline.lanes.values()))
    screen = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else WIDTH
    columns = max(_LEAST_COLUMNS, min(WIDTH, screen) - width - len("    100%"))
    lines = [f"{'':<{width}}  {'0':<{columns // 2}}{format_ms(timeline.step_ms):>{columns - columns // 2}}"]
    for lane, name in timeline.lanes.items():
        shares = busy_shares(timeline, lane, columns)
        cells = "".join(shades[min(len(shades) - 1, int(share * (len(shades) - 1) + 0.75))] for share in shares)
        lines.append(f"{name:<{width}}  {cells}  {sum(shares) / columns:4.0%}")
    lines.append(f"{'':<{width}}  {_phase_line(timeline, columns)}")
    return "\n".join(lines)


def busy_shares(timeline: Timeline, lane: int, columns: int) -> list[float]:
    """Per column the part of its time that ``lane`` works, from 0 to 1."""
    column_ms = timeline.step_ms / columns
    busy = [0.0] * columns
    for operation in timeline.operations:
        if operation.lane != lane:
            continue
        start, end = max(operation.start_ms, 0.0), min(operation.end_ms, timeline.step_ms)
        for column in range(int(start / column_ms), min(columns, int(end / column_ms) + 1)):
            busy[column] += max(0.0, min(end, (column + 1) * column_ms) - max(start, column * column_ms))
    return [min(1.0, time_ms / column_ms) for time_ms in busy]


def _phase_line(timeline: Timeline, columns: int) -> str:
    """Where phases begin and, where there is room, what they are called."""
    ends = [timeline.forward_end_ms, timeline.backward_end_ms, timeline.step_ms]
    stops = [round(end / timeline.step_ms * columns) for end in ends]
    line = ""
    for name, stop in zip(_PHASES, stops, strict=True):
        room = stop - len(line)
        line += f"|{name}"[:room].ljust(room) if room > len(name) else "|"[:room].ljust(room)
    return line.rstrip()


def _shows_blocks() -> bool:
    try:
        _SHADES.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True
