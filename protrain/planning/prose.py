"""A plan in words: where model states and activations are, who updates, and what limits the step."""

from __future__ import annotations

from collections.abc import Sequence

from protrain.common.tables import format_ms
from protrain.planning.plan import BlockMode, Plan
from protrain.planning.predict import Models
from protrain.planning.timeline import Phase, phases

_SHORT = 0.02  # of a step: what limits a phase of less is of no interest


def in_short(plan: Plan, models: Models) -> str:
    """How fast ``plan`` is and what limits it, and where states and activations are: two sentences, one a line."""
    device = "GPU" if models.hardware.device_type == "cuda" else "device"
    parts = phases(models.timeline(plan.block_modes, plan.counts))
    places = states(plan, models.memory.large_buffers[plan.n_persist], device), activations(plan)
    return (
        f"predicted: {format_ms(plan.step_ms)} a step, {plan.tokens_per_s:,.0f} tokens/s, "
        f"limited by {limits(parts, device)}\n{'; '.join(filter(None, places))}"
    )


def limits(parts: Sequence[Phase], device: str) -> str:
    """What limits each phase that is not short, and how much of the step the device computes."""
    whole_ms = sum(phase.length_ms for phase in parts)
    long = [phase for phase in parts if phase.length_ms > _SHORT * whole_ms]
    shares = [f"{phase.name} ({phase.length_ms / whole_ms:.0%}) by {phase.limit}" for phase in long]
    by = long[0].limit if len({phase.limit for phase in long}) == 1 else ", ".join(shares)
    computing = sum(phase.compute_ms for phase in parts) / whole_ms
    return f"{by}; the {device} computes {computing:.0%} of the step"


def states(plan: Plan, n_large: int, device: str) -> str:
    """Where the states are, of several GPUs their shards, and through what the other weights pass."""
    away = plan.n_chunks - plan.n_persist
    chunks, buffers = counted(plan.n_chunks, "chunk"), _buffers(plan, n_large)
    here = f"{plan.n_persist} of {chunks}" if away else f"all {chunks}"
    if plan.world_size > 1:
        others = f", those of {counted(away, 'other')} in host memory" if away else ""
        whole = "stay in" if plan.n_buffer + n_large >= plan.n_chunks else "pass through"
        return f"shards of {here} on each {device}{others}; whole weights {whole} {buffers} of each"
    if not away:
        return f"{here} on the {device}"
    others = f"the weights of the other {away} pass" if away > 1 else "the weight of the other passes"
    return f"{here} on the {device}; {others} from host memory through {buffers}"


def _buffers(plan: Plan, n_large: int) -> str:
    buffers = [counted(plan.n_buffer, "buffer")] if plan.n_buffer else []
    buffers += [counted(n_large, "large one" if buffers else "large buffer")] if n_large else []
    return " and ".join(buffers)


def updates(plan: Plan, device: str, in_backward: bool) -> str:
    """Which updates do not wait for the norm, and who makes them; "" if all wait."""
    parts = ["inside backward"] if in_backward else []
    if plan.n_speculate:
        alone = f", of {plan.n_weight_only} of them the weights alone" if plan.n_weight_only else ""
        parts.append(f"the host does {counted(plan.n_speculate, 'chunk')} before the norm is known{alone}")
    if plan.stream and plan.n_persist + plan.n_speculate < plan.n_chunks:
        parts.append(f"the {device} helps when the host is late")
    return "; ".join(parts)


def counted(count: int, what: str) -> str:
    """The number and the noun: "1 chunk", "3 chunks"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def activations(plan: Plan) -> str:
    """What becomes of the activations of each block."""
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
