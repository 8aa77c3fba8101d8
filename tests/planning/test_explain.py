"""Explanations: what phases wait for, what knobs do, what more memory buys; checked against the models themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import load, other_machines
from protrain.planning import Plan, evaluate, explain, search
from protrain.planning.answer import alternatives
from protrain.planning.plan import Counts
from protrain.planning.ranges import Change
from protrain.planning.rates import slower_share
from protrain.planning.timeline import DOWN, GPU, HOST, UP, Operation, Timeline, phases
from protrain.profiler.model_profile import ModelProfile
from tests.planning.models import MIB, equal_blocks, machine, profile_of, with_host

N = 8 * MIB  # elements of a chunk


def make_profile(n: int = 6, *, saved: int = 400 * MIB, ms: float = 20.0, device: str = "cuda") -> ModelProfile:
    """Equal blocks of one chunk each, as a trace on a GPU would give them."""
    segments = [("forward", at, saved // 16 * at, saved // 4, ms) for at in range(n)]
    segments += [("backward", at, saved // 16 * at, saved, 3 * ms) for at in reversed(range(n))]
    blocks = equal_blocks(n, ms, 2 * ms, saved, forward_peak_bytes=saved, input_bytes=0, output_bytes=0)
    return replace(profile_of([(N, 0)] * n, [(at, (at,)) for at in range(n)], blocks, segments), device=device)


# 42 ms a chunk, where a block computes 20; the GPU cannot help
SLOW_HOST: dict[str, Any] = {"host_adam_gparams": 0.2, "streamed_adam_gparams": None}
SLOW_LINK: dict[str, Any] = {"h2d_gbps": 0.2, "d2h_gbps": 0.2, "bidirectional_gbps": 0.4}


def hand_made(profile: ModelProfile, hardware: HardwareProfile, **counts: int) -> Plan:
    options: dict[str, Any] = {"n_persist": 0, "n_buffer": 2, "n_swap": 0, "n_ckpt": len(profile.blocks), **counts}
    return evaluate(profile, hardware, chunk_elements=N, **options)


def operation(lane: int, name: str, start: float, end: float) -> Operation:
    return Operation(lane=lane, name=name, start_ms=start, end_ms=end)


def test_a_wait_is_blamed_on_what_led_to_it() -> None:
    """Layer 1 waits for an upload of 2 ms that waited for an update of 6: three quarters are the host's."""
    timeline = Timeline(
        step_ms=20.0,
        forward_end_ms=10.0,
        backward_end_ms=18.0,
        operations=(
            operation(HOST, "update 0", -4.0, 2.0),
            operation(GPU, "forward a", 0.0, 1.0),
            operation(UP, "weights 0", 2.0, 4.0),
            operation(GPU, "forward b", 4.0, 10.0),
            operation(GPU, "backward b", 10.0, 12.0),
            operation(DOWN, "gradients 0", 12.0, 16.0),
            operation(GPU, "backward a", 16.0, 18.0),
        ),
    )
    forward, backward, after = phases(timeline)
    assert (forward.length_ms, forward.compute_ms) == (10.0, 7.0)
    one_rank = ("uploads", "offloads", "host optimizer", "streamed updates", "nothing")  # which waits for no other
    none = dict.fromkeys(one_rank, 0.0)
    assert forward.waits_ms == pytest.approx(none | {"uploads": 0.75, "host optimizer": 2.25})
    assert forward.limit == "compute"  # 6 of 10 ms on the chain
    assert backward.waits_ms["offloads"] == pytest.approx(4.0)
    assert backward.compute_ms == pytest.approx(4.0)
    assert after.waits_ms["nothing"] == pytest.approx(2.0)
    assert after.compute_ms == 0.0


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("counts", [{}, {"n_swap": 2, "n_ckpt": 3}, {"n_persist": 3, "n_ckpt": 1}, {"n_persist": 6}])
def test_computing_and_waiting_make_up_the_step(counts: dict[str, int], inside: bool) -> None:
    traced, hardware = make_profile(), machine("8GiB", "4GiB", **SLOW_HOST)
    if counts.get("n_persist") == 6:
        counts = {**counts, "n_buffer": 0}
    plan = hand_made(traced, hardware, **counts)
    why = explain(plan, replace(traced, step_during_backward=inside), hardware)
    for phase in why.phases:
        assert phase.compute_ms + sum(phase.waits_ms.values()) == pytest.approx(phase.length_ms, abs=1e-6)
    assert sum(phase.length_ms for phase in why.phases) == pytest.approx(why.fitting.step_ms)
    computing = sum(segment.duration_ms for segment in traced.segments) - 20.0 * (6 - plan.n_ckpt)
    assert sum(phase.compute_ms for phase in why.phases) >= computing - 1e-6


def test_the_critical_resource_is_the_one_that_is_slow() -> None:
    traced, quick = make_profile(), machine("8GiB", "4GiB")
    slow_host, slow_link = replace(quick, **SLOW_HOST), replace(quick, **SLOW_LINK)

    def forward_limit(hardware: HardwareProfile, **counts: int) -> str:
        return explain(hand_made(traced, hardware, **counts), traced, hardware).phases[0].limit

    assert forward_limit(slow_host) == "host optimizer"
    assert forward_limit(slow_link) == "uploads"
    assert forward_limit(slow_link, n_persist=6, n_buffer=0, n_swap=4, n_ckpt=0) == "offloads"
    assert forward_limit(quick) == "compute"
    ranks = replace(quick, world_size=2, all_gather_gbps=0.2)
    assert forward_limit(ranks, n_persist=6) == "gathers"


def test_a_knob_does_what_the_plan_with_it_does() -> None:
    traced, hardware = make_profile(), machine("16GiB", "4GiB", **SLOW_HOST)
    blocks = tuple(replace(block, attention_bytes=8 * MIB, attention_ms=5.0) for block in traced.blocks)
    traced = replace(traced, blocks=blocks)
    counts = {"n_persist": 2, "n_swap": 1, "n_ckpt": 2, "n_ckpt_swap": 1, "n_speculate": 2, "n_weight_only": 1}
    plan = hand_made(traced, hardware, **counts)
    changes = explain(plan, traced, hardware).changes
    slower = with_host(hardware, slower_share(hardware))
    knobs = [(knob, step) for knob in Counts._fields if knob != "n_device_sum" for step in (1, -1)]
    assert [(change.knob, change.step) for change in changes] == [*knobs, ("keep_attention", 1)]
    for change in changes:
        counts = dict(zip(Counts._fields, change.counts, strict=True))
        keep = change.knob == "keep_attention"
        other = hand_made(traced, hardware, **counts, keep_attention=keep)
        assert change.impossible == ""
        assert getattr(other, change.knob) == getattr(plan, change.knob) + change.step
        assert change.step_ms == pytest.approx(other.step_ms)
        late = hand_made(traced, slower, **counts, keep_attention=keep)
        assert change.slower_ms == pytest.approx(late.step_ms)
        assert late.step_ms >= other.step_ms
        assert (change.device_bytes, change.host_bytes) == (other.device_bytes, other.host_bytes)


def found(changes: tuple[Change, ...], knob: str, step: int) -> Change:
    return next(change for change in changes if (change.knob, change.step) == (knob, step))


def test_an_infeasible_knob_says_by_how_many_bytes() -> None:
    traced, roomy = make_profile(), machine("8GiB", "4GiB")
    plan = hand_made(traced, roomy, n_persist=2)
    exact = replace(roomy, device_bytes=plan.device_bytes, host_bytes=plan.host_bytes)
    rows = explain(plan, traced, exact).knob_table().splitlines()
    (row,) = (index for index, line in enumerate(rows) if line.startswith("n_persist 2 -> 3"))
    assert rows[row + 1] == "    infeasible: 112 MiB too much device memory"


def test_impossible_knobs_say_why_and_others_take_along_what_they_need() -> None:
    traced, hardware = make_profile(), machine("16GiB", "4GiB")

    def changes(inside: bool = False, **counts: int) -> tuple[Change, ...]:
        plan = hand_made(traced, hardware, **counts)
        return explain(plan, replace(traced, step_during_backward=inside), hardware).changes

    resident = changes(n_persist=6, n_buffer=0)
    assert found(resident, "n_persist", 1).impossible == "all chunks are persistent"
    assert found(resident, "n_ckpt", 1).impossible == "every block is swapped or checkpointed"
    assert found(resident, "n_swap", -1).impossible == "there is none to give up"
    assert found(resident, "keep_attention", 1).impossible == "no block has a fused attention"
    assert found(changes(inside=True), "n_speculate", 1).impossible.endswith("no update waits for step()")
    assert found(resident, "n_persist", -1).counts == (5, 1, 0, 6, 0, 0, 0, 0)  # with the buffer that it then needs
    moved = changes(n_ckpt=3, n_ckpt_swap=3)
    assert found(moved, "n_ckpt", -1).counts == (0, 2, 0, 2, 2, 0, 0, 0)  # with as many inputs as it then has
    early = changes(n_persist=2, n_speculate=4)
    assert found(early, "n_persist", 1).counts[5:7] == (3, 0)  # with as many speculative updates as there are chunks


def test_alternatives_are_what_the_search_finds_for_them() -> None:
    traced, hardware = make_profile(), machine("1400MiB", "2GiB", **SLOW_HOST)
    mine = replace(hardware, device_type="cuda", name="NVIDIA GeForce RTX 3090")
    machines = other_machines(mine)
    found = {other.what: other.plan for other in alternatives(traced, mine, machines)}
    more_ram, card, two = machines.values()
    elsewhere = replace(traced, device="meta")  # what took so long on this card tells nothing of another one
    assert found == {
        "bf16 moments": search(replace(traced, moment_dtype="bfloat16"), mine),
        "64 GiB more RAM": search(traced, more_ram),
        "the next card (rtx4090)": search(elsewhere, card),
        "2 GPUs": None,  # what NCCL takes is more than such a card has
    }
    assert [machine.world_size for machine in machines.values()] == [1, 1, 2]
    assert more_ram.host_bytes - hardware.host_bytes == pytest.approx(0.9 * 64 * 1024**3)
    assert two.host_bytes == hardware.host_bytes // 2, "one machine's RAM serves both"
    assert (card.host_bytes, card.host_adam_gparams) == (hardware.host_bytes, hardware.host_adam_gparams)
    assert card.matmul_tflops == load("rtx4090").matmul_tflops


def test_bytes_by_kind_add_up() -> None:
    traced, hardware = make_profile(), machine("8GiB", "4GiB")
    plan = hand_made(traced, hardware, n_persist=2, n_swap=2, n_ckpt=2)
    why = explain(plan, traced, hardware)
    assert sum(why.device_bytes.values()) == 2 * plan.device_bytes  # the whole, and its parts
    assert sum(why.host_bytes.values()) == 2 * plan.host_bytes
    assert why.device_bytes["persistent chunks"] == 2 * N * 14
    assert (why.host_bytes["weights"], why.host_bytes["gradients"]) == (4 * N * 2, 4 * N * 2)
    assert why.host_bytes["optimizer states"] == 4 * N * 10
    assert why.host_bytes["swapped activations"] >= 2 * 400 * MIB
