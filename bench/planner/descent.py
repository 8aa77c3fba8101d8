"""Is there a faster plan than the chosen one? Others drawn at random, then coordinate descent from the best.

The fastest of thirty is also the luckiest of them, on a machine whose host is slower in one minute than in the next. So
the chosen plan and the fastest others are measured again, in turn, and those times count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench.planner.draw import draw
from bench.planner.measure import Point
from protrain.common.errors import PlanError
from protrain.hardware import HardwareProfile
from protrain.planning import MemoryModel, Plan, evaluate
from protrain.planning.layout import updated_chunks
from protrain.planning.plan import layout_of
from protrain.profiler import ModelProfile

_SWITCHES = ("early_weights", "keep_attention")
_KNOBS = ("n_persist", "n_buffer", "n_swap", "n_ckpt", "n_ckpt_swap", "n_speculate", "n_stream", "n_whole", *_SWITCHES)
_BETTER = 0.995  # of the step time: less is noise
_RIVALS = 2  # of the chosen plan, measured again with it
_ROUNDS = 3


def descend(
    profile: ModelProfile,
    hardware: HardwareProfile,
    measure: Callable[[Plan | None], Point],
    *,
    others: int,
    seed: int,
    step_during_backward: bool,
    in_time: Callable[[], bool],
) -> Iterator[Point]:
    """The chosen plan, ``others`` spread over what fits, and every neighbour on the way down from the fastest of them.

    A neighbour differs by one in one knob, or in whether it keeps attention. Where it doesn't fit, buffers, early and
    streamed updates give way; where fewer blocks are recomputed, moved inputs do.
    """
    best = chosen = measure(None)
    yield chosen
    known = {plan_key(chosen.plan)}
    for plan in draw(profile, hardware, others, seed=seed, step_during_backward=step_during_backward):
        if not in_time():
            return
        if plan_key(plan) not in known:
            known.add(plan_key(plan))
            point = measure(plan)
            yield point
            best = _faster(best, point)
    improved = True
    while improved:
        improved = False
        for plan in _neighbours(best.plan, profile, hardware, step_during_backward=step_during_backward):
            if plan_key(plan) in known:
                continue
            if not in_time():
                return
            known.add(plan_key(plan))
            point = measure(plan)
            yield point
            if _faster(best, point) is point:
                best, improved = point, True
                break


def _faster(best: Point, point: Point) -> Point:
    if point.error:
        return best
    return point if best.error or point.median_ms < best.median_ms * _BETTER else best


def again(
    points: Sequence[Point], measure: Callable[[Plan | None], Point], in_time: Callable[[], bool]
) -> Iterator[Point]:
    """The chosen plan, first of ``points``, and the fastest others, in turn and more than once each."""
    ran = sorted((point for point in points[1:] if not point.error), key=lambda point: point.median_ms)
    if not ran or points[0].error:
        return
    for _ in range(_ROUNDS):
        for point in (points[0], *ran[:_RIVALS]):
            if not in_time():
                return
            yield measure(point.plan)


def plan_key(plan: Plan) -> tuple[int, ...]:
    """What tells plans for one case apart."""
    return tuple(int(getattr(plan, name)) for name in _KNOBS)


def _neighbours(
    plan: Plan, profile: ModelProfile, hardware: HardwareProfile, *, step_during_backward: bool
) -> Iterator[Plan]:
    layout = layout_of(profile, plan)
    memory = MemoryModel(profile, hardware, layout, update_in_backward=step_during_backward)
    updated = updated_chunks(profile, layout)
    attends = plan.n_ckpt > 0 and any(block.attention_bytes for block in profile.blocks)
    for knob in _KNOBS if attends else _KNOBS[:-1]:
        for change in (1, -1):
            counts = dict(zip(_KNOBS, plan_key(plan), strict=True))
            counts[knob] += change
            away = plan.n_chunks - counts["n_persist"]
            if (
                not {counts[switch] for switch in _SWITCHES} <= {0, 1}
                or counts["early_weights"] > counts["n_speculate"]
            ):
                continue
            if not 0 <= away <= plan.n_chunks:
                continue
            early = counts["n_speculate"] if knob == "n_speculate" else min(counts["n_speculate"], away)
            whole = counts["n_whole"] if counts["early_weights"] or knob == "n_whole" else 0
            moved = counts["n_ckpt_swap"] if knob == "n_ckpt_swap" else min(counts["n_ckpt_swap"], counts["n_ckpt"])
            buffers = counts["n_buffer"]
            if knob != "n_buffer":
                most = memory.all_buffers(counts["n_persist"])
                buffers = max(min(buffers, most), memory.least_buffers(counts["n_persist"]))
            while buffers >= 0 and early >= 0:
                others = sum(chunk >= counts["n_persist"] + early for chunk in updated)
                stream = counts["n_stream"] if knob == "n_stream" else min(counts["n_stream"], others)
                try:
                    yield evaluate(
                        profile,
                        hardware,
                        n_persist=counts["n_persist"],
                        n_buffer=buffers,
                        n_swap=counts["n_swap"],
                        n_ckpt=counts["n_ckpt"],
                        n_ckpt_swap=moved,
                        n_speculate=early,
                        early_weights=bool(counts["early_weights"]),
                        n_whole=whole,
                        n_stream=stream,
                        keep_attention=bool(counts["keep_attention"]),
                        chunk_elements=plan.chunk_elements,
                        large_first=plan.large_first,
                        step_during_backward=step_during_backward,
                    )
                    break
                except PlanError as error:  # with one less, perhaps
                    if error.where == "host":
                        early -= 1
                    else:
                        buffers -= 1
                except ValueError:
                    break  # a count out of range
