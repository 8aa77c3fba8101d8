"""What holds for every plan that a search finds, whatever the model and the machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.planning import Plan, evaluate, explain, search
from protrain.planning.plan import Counts
from protrain.planning.predict import Models
from protrain.planning.rates import staging_bytes
from protrain.profiler.model_profile import ModelProfile
from tests.planning.brute_force import N, as_measured, margin, random_machine, random_profile, tight_case
from tests.planning.models import LONG, machine, make_profile, with_attention

Case = tuple[ModelProfile, HardwareProfile]
TIES = 1.005  # among plans that are this close, the search prefers the plan with fewer transfers
# By mechanism, the seed of a small model whose plan uses it. That of weight-only updates is of another kind.
USING = {"n_swap": 13, "n_ckpt_swap": 9, "n_speculate": 22, "n_weight_only": 28, "stream": 13, "keep_attention": 5}
SLOW_HOST: dict[str, Any] = {"host_adam_gparams": 0.3, "streamed_adam_gparams": 0.3}
HELPLESS_HOST: dict[str, Any] = {"host_adam_gparams": 0.8, "streamed_adam_gparams": None}
FAST_LINK: dict[str, Any] = {"h2d_gbps": 500.0, "d2h_gbps": 500.0, "bidirectional_gbps": 1000.0}
SLOW_LINK: dict[str, Any] = {"h2d_gbps": 5.0, "d2h_gbps": 5.0, "bidirectional_gbps": 8.0}
CASES: dict[str, Callable[[], Case]] = {
    "speculates": lambda: (make_profile(12, ms=2.0), machine("1200MiB", "3GiB", **HELPLESS_HOST)),
    "streams": lambda: (make_profile(12, ms=2.0), machine("1200MiB", "3GiB", **SLOW_HOST)),
    "swaps": lambda: (make_profile(6, ms=200.0), machine("2200MiB", "20GiB", **FAST_LINK)),
    "offloads inputs": lambda: (make_profile(**LONG), machine("10GiB", "40GiB")),
    "keeps attention": lambda: (with_attention(make_profile(12), 0.5, 16), machine("2GiB", "8GiB", **SLOW_LINK)),
    "has sixty blocks": lambda: (make_profile(60), machine("4GiB", "20GiB")),
}


def small_case(seed: int) -> Case:
    """A random model on a random machine with a slow host. Some machines can stream, some models have attention."""
    draw = random.Random(seed)
    profile = as_measured(random_profile(draw, draw.choice([4, 8, 16])), draw)
    hardware = replace(random_machine(draw), host_adam_gparams=draw.choice([0.2, 0.4, 0.8]))
    hardware = replace(hardware, device_bytes=int(1.3 * hardware.device_bytes))
    if draw.random() < 0.5:
        device_bytes = hardware.device_bytes + staging_bytes(N)
        hardware = replace(hardware, device_bytes=device_bytes, streamed_adam_gparams=draw.choice([1.0, 2.0, 4.0]))
    return (with_attention(profile, 0.4, 16) if draw.random() < 0.3 else profile), hardware


@cache
def found_for(name: str) -> Plan:
    """The plan of one of ``CASES``."""
    return search(*CASES[name]())


def score_ms(plan: Plan, profile: ModelProfile, hardware: HardwareProfile, counts: Counts | None = None) -> float:
    """What the search judges ``plan`` or ``counts`` by, small shares aside: [Note: what a plan is judged by]."""
    models, counts = Models.of(plan, profile, hardware), counts or plan.counts
    judged_ms = models.judged_ms(models.modes(counts), counts)
    return judged_ms * margin(counts, plan.n_chunks, keep_attention=plan.keep_attention)


@pytest.mark.parametrize("name", CASES)
def test_no_plan_leaves_a_better_neighbour(name: str) -> None:
    profile, hardware = CASES[name]()
    plan = found_for(name)
    own_ms = score_ms(plan, profile, hardware)
    n_feasible = 0
    for change in explain(plan, profile, hardware).changes:
        fits = change.device_bytes <= hardware.device_bytes and change.host_bytes <= hardware.host_bytes
        if change.impossible or not fits:
            continue
        other = replace(plan, keep_attention=plan.keep_attention ^ (change.knob == "keep_attention"))
        other_ms = score_ms(other, profile, hardware, Counts(*change.counts))
        assert other_ms >= own_ms / TIES, f"{change.knob} {change.step:+} of {plan}"
        n_feasible += 1
    assert n_feasible > 0


@pytest.mark.parametrize("name", ["streams", "keeps attention"])
def test_the_same_question_has_the_same_answer(name: str) -> None:
    assert search(*CASES[name]()) == found_for(name)


# By seed, the best plans of small models that are far from other good ones: with swapped blocks alone, with one
# speculative update that computes only the weight, and with as many whole ones as host memory has room for.
APART = [
    (0, Counts(0, 1, 5, 0)),
    (9, Counts(1, 2, 0, 5, 2, 1, 1)),
    (248, Counts(0, 2, 0, 6, 4, 5, 1)),
    (621, Counts(2, 4, 1, 0, 0, 2, 1)),
    (603, Counts(1, 4, 0, 5, 3, 5, 4)),
]


@pytest.mark.parametrize(("seed", "counts"), APART)
def test_a_plan_apart_from_others_is_found(seed: int, counts: Counts) -> None:
    profile, hardware = small_case(seed)
    best = evaluate(profile, hardware, **counts._asdict(), chunk_elements=N)
    found = search(profile, hardware, chunk_elements=N)
    assert score_ms(found, profile, hardware) <= TIES * score_ms(best, profile, hardware)


@pytest.mark.parametrize("name", USING)
def test_each_mechanism_is_used_where_it_gains(name: str) -> None:
    profile, hardware = tight_case(USING[name]) if name == "n_weight_only" else small_case(USING[name])
    assert getattr(search(profile, hardware), name)
