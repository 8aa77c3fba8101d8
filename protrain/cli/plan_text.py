"""An answer in ten lines, and one step as text.

A step has a lane a line, in columns of equal time, darker where the lane works more.
"""

from __future__ import annotations

import shutil
import sys

from protrain.common.tables import WIDTH, aligned, format_bytes, format_ms, per_gpu
from protrain.planning import Answer, BlockMode, Plan
from protrain.planning.timeline import Timeline

_LEAST_COLUMNS = 20
_SHADES = " ░▒▓█"
_PLAIN_SHADES = " .:+#"
_PHASES = ("forward", "backward", "after")
_SHORT = 0.02  # of a step: what limits a phase of less is of no interest


def summary_text(answer: Answer) -> str:
    """What a reader who stops after ten lines should know of a model that fits."""
    plan, slower, n_gpus = answer.fitting, answer.on_slower_host(), answer.machine.gpus
    device = "GPU" if answer.machine.device_type == "cuda" else "device"
    basis = "estimated from counted operations, not measured" if answer.estimated else "predicted"
    used = [format_bytes(size) for size in (plan.device_bytes, plan.host_bytes)]
    rows = [
        ["step", f"{answer.speed} ({basis}){slower and '; '}{slower}"],
        [f"{device} memory", f"{used[0]} of {format_bytes(answer.machine.device_bytes)}"],
        [per_gpu("host memory", n_gpus), f"{used[1]} of {format_bytes(answer.machine.host_bytes)}"],
        ["collectives", ", ".join(f"{what} {rate}" for what, rate in answer.machine.collectives.items())],
        ["model states", _states(plan, answer.large_buffers, device)],
        ["updates", _updates(plan, device, answer.updates_in_backward)],
        ["activations", _activations(plan)],
        ["limited by", _limited_by(answer, device)],
        ["step time", _gains(answer)],
        ["plan", str(plan)],
    ]
    return aligned([row for row in rows if row[1]], WIDTH)


def _limited_by(answer: Answer, device: str) -> str:
    whole_ms = sum(phase.length_ms for phase in answer.phases)
    long = [phase for phase in answer.phases if phase.length_ms > _SHORT * whole_ms]
    shares = [f"{phase.name} ({phase.length_ms / whole_ms:.0%}) by {phase.limit}" for phase in long]
    by = long[0].limit if len({phase.limit for phase in long}) == 1 else ", ".join(shares)
    computing = sum(phase.compute_ms for phase in answer.phases) / whole_ms
    return f"{by}; the {device} computes {computing:.0%} of the step"


def _gains(answer: Answer) -> str:
    """The fastest plan with up to twice the memory of either kind; "" where it was not searched."""
    if answer.better is None:
        return ""
    found = []
    for memory in ("", "device", "host"):
        of_kind = [better for better in answer.better if better.memory == memory]
        for better in of_kind[:1] + of_kind[1:][-1:]:  # the least that helps, and what helps most
            found.append(f"{answer.change(better)} {better.where}")
    return ", ".join(found) or "no faster plan with up to twice of either"


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
