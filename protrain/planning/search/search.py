"""The search: the integers that make a step fastest within the memory there is (paper section 4).

It leaves nothing out that could win (:mod:`protrain.planning.search.columns`): first of the plans whose early updates
are whole, then of those that update weights alone. Streamed updates are looked for from the fastest of either kind
(:mod:`protrain.planning.search.streamed_search`), early updates of both kinds at once from the fastest of all.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from operator import attrgetter

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import layouts
from protrain.planning.plan import Plan
from protrain.planning.rates.caution import likely_machines
from protrain.planning.rates.kept_attention import least_ms
from protrain.planning.search.both_kinds import both_kinds
from protrain.planning.search.columns import WEIGHTS_GAIN, Columns
from protrain.planning.search.infeasible import nothing_fits
from protrain.planning.search.models import Models
from protrain.planning.search.settled import TOLERANCE, Counts, best_early, settled
from protrain.planning.search.streamed_search import STREAMING_GAIN, StreamedSearch
from protrain.profiler.model_profile import ModelProfile

_REFINES = 0.01  # of a step, what another number of early updates than the simulation chooses may save
_ATTENTION_GAIN = 0.01  # of a step, what keeping attention must save


def search(
    profile: ModelProfile,
    hardware: HardwareProfile,
    *,
    chunk_elements: int | None = None,
    step_during_backward: bool = False,
) -> Plan:
    """The fastest plan for ``profile`` in the mean of the hosts that ``hardware`` may turn out to have.

    That is one of those that are the fastest with one of these hosts: see [Note: caution]. With each it is, within 1%,
    the fastest of the plans that make whole updates, all on the host: see TOLERANCE and Columns. Where one with early
    weights or with streamed updates is found that is clearly faster, or one that keeps attention, it is that: see
    WEIGHTS_GAIN and [Note: looking for streamed updates]. The plan's ``step_ms`` is for ``hardware`` as it is.

    Args:
        profile: of the model and the batch.
        hardware: the machine; its ``device_bytes`` and ``host_bytes`` are the limits.
        chunk_elements: size of a chunk; default: :func:`protrain.planning.layout.choose_chunk_elements`.
        step_during_backward: plan for updates inside backward.

    Raises:
        PlanError: nothing fits; it says what is needed, what is there, and the smallest change that fits.
        ValueError: ``chunk_elements`` does not suit the model.
    """
    machines = likely_machines(hardware)

    def models_on(machine: HardwareProfile, plan: Plan) -> Models:
        return Models.of(plan, profile, machine, step_during_backward)

    def mean_ms(plan: Plan) -> float:
        return sum(probability * models_on(one, plan).again(plan).step_ms for one, probability in machines)

    plans = [_fastest_on(one, profile, chunk_elements, step_during_backward) for one, _ in machines]
    best = min(plans, key=mean_ms)
    return models_on(hardware, best).again(best)


def _fastest_on(
    hardware: HardwareProfile, profile: ModelProfile, chunk_elements: int | None, step_during_backward: bool
) -> Plan:
    """The fastest plan on ``hardware`` as it is; the arguments are those of :func:`search`."""
    found = layouts(profile, chunk_elements)

    def models(*, keep_attention: bool = False) -> list[Models]:
        return [
            Models(profile, hardware, layout, step_during_backward, keep_attention=keep_attention) for layout in found
        ]

    plan = _fastest(either := models())
    if plan is None:
        errors = [nothing_fits(one.memory, one.moves) for one in either]
        raise min(errors, key=lambda error: error.needed_bytes - error.available_bytes)
    limit_ms = plan.step_ms * (1 - _ATTENTION_GAIN)
    if least_ms(profile, hardware, plan.step_ms) >= limit_ms + plan.step_ms * TOLERANCE:
        return plan
    keeping = _fastest(models(keep_attention=True), limit_ms)
    return plan if keeping is None or keeping.step_ms >= limit_ms else keeping


def _fastest(either: list[Models], limit_ms: float = inf) -> Plan | None:
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


def _of_one_kind(either: list[Models], found: list[tuple[Plan | None, Plan | None]], limit_ms: float) -> Plan | None:
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


def _of_order(models: Models, limit_ms: float) -> tuple[Plan | None, Plan | None]:
    """The plan of one order whose early updates are whole, and one of weights alone that is clearly faster, if any."""
    columns = Columns(models.profile, models.hardware, models.memory, models.runtime, models.moves, tolerance=TOLERANCE)
    found = columns.walk(limit_ms=limit_ms * (1 + _REFINES))
    whole = settled(models, found) if found else None
    if whole is not None:
        limit_ms = whole.step_ms * (1 - WEIGHTS_GAIN)
    if models.runtime.speculates and (found := columns.walk(weights=True, limit_ms=limit_ms)):
        weights = models.plan(*best_early(models, Counts(*min(found)[1:]), early_weights=True), early_weights=True)
        if weights.step_ms < limit_ms:
            return whole, weights
    return whole, None
