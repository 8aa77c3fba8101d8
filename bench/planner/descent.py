"""Looks for a faster plan than the chosen one and those drawn at random: coordinate descent from the fastest.

A host may be slower in one minute than in the next, so the fastest of thirty plans is also the luckiest. So the chosen
plan and the fastest others are measured again, in alternation, and only those times count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce

from bench.planner.measure import Point
from protrain.hardware.profile import HardwareProfile
from protrain.planning import Plan
from protrain.planning.plan import Counts
from protrain.planning.predict import Models
from protrain.planning.ranges import neighbours
from protrain.profiler.model_profile import ModelProfile

_BETTER = 0.995  # a plan is faster if it takes less than this share of the step time; smaller gains are noise
_RIVALS = 2  # how many of the fastest other plans are measured again with the chosen plan
_ROUNDS = 3


def descend(
    points: Sequence[Point],
    profile: ModelProfile,
    hardware: HardwareProfile,
    measure: Callable[[Plan | None], Point],
    *,
    in_time: Callable[[], bool],
) -> Iterator[Point]:
    """Measure the neighbours on a descent from the fastest of ``points``, which are measured already.

    A neighbour differs by one in one integer, or in whether it keeps attention.
    """
    best, known = reduce(_faster, points), {plan_key(point.plan) for point in points}
    improved = True
    while improved:
        improved = False
        for plan in _neighbours(best.plan, profile, hardware):
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
    """Measure the chosen plan, which is the first of ``points``, and the fastest others again, in alternation."""
    ran = sorted((point for point in points[1:] if not point.error), key=lambda point: point.median_ms)
    if not ran or points[0].error:
        return
    for _ in range(_ROUNDS):
        for point in (points[0], *ran[:_RIVALS]):
            if not in_time():
                return
            yield measure(point.plan)


def plan_key(plan: Plan) -> tuple[int, ...]:
    """A key that is different for different plans of one case."""
    return (*plan.counts, plan.keep_attention, plan.stream)


def _neighbours(plan: Plan, profile: ModelProfile, hardware: HardwareProfile) -> Iterator[Plan]:
    """The plans of the what-if table. One that does not fit gets fewer buffers or speculative updates until it does."""
    for switched in (plan, replace(plan, keep_attention=not plan.keep_attention)):
        models = Models.of(switched, profile, hardware)
        counts = [Counts(*one.counts) for one in neighbours(plan.counts, models) if not one.impossible]
        if switched is not plan:
            attends = plan.n_ckpt > 0 and any(block.attention_bytes for block in profile.blocks)
            counts = [plan.counts] if attends else []
        for wanted in counts:
            changed = wanted
            while (error := _over(changed, models)) and min(changed.n_buffer, changed.n_speculate) >= 0:
                if error == "host":
                    changed = changed._replace(n_speculate=changed.n_speculate - 1)
                else:
                    changed = changed._replace(n_buffer=changed.n_buffer - 1)
                n_weight_only = min(changed.n_weight_only, max(0, changed.n_speculate))
                changed = changed._replace(n_weight_only=n_weight_only)
            enough = changed.n_buffer >= models.memory.least_buffers[changed.n_persist]
            if enough and changed.n_speculate >= 0:
                yield models.plan(changed)


def _over(counts: Counts, models: Models) -> str:
    """The memory that ``counts`` do not fit: "host" or "device", or "" if they fit."""
    modes = models.modes(counts)
    if models.memory.host_bytes(counts, modes) > models.hardware.host_bytes:
        return "host"
    return "device" if models.memory.device_bytes(counts, modes) > models.hardware.device_bytes else ""
