"""Plans by hand and from files: which are refused, and what the models say of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, Plan, block_modes, check, evaluate, fingerprint, search
from protrain.planning.plan import name_other_use, refuse_other_model
from protrain.planning.predict import host_gparams
from protrain.profiler.model_profile import ModelProfile
from tests.planning.models import GIB, H100, MIB, machine, make_profile

NONE, CKPT, SWAP, CKPT_SWAP = BlockMode.NONE, BlockMode.CKPT, BlockMode.SWAP, BlockMode.CKPT_SWAP


def test_swapped_blocks_lie_early_with_checkpointed_ones_between() -> None:
    assert block_modes(6, 2, 3) == (SWAP, CKPT, SWAP, CKPT, CKPT, NONE)
    assert block_modes(4, 3, 1) == (SWAP, CKPT, SWAP, SWAP)
    assert block_modes(0, 0, 0) == ()
    with pytest.raises(ValueError, match=r"n_swap=2 and n_ckpt=3 .* 4 blocks"):
        block_modes(4, 2, 3)


def test_the_first_recomputed_blocks_have_their_inputs_offloaded() -> None:
    assert block_modes(5, 0, 4, 2) == (CKPT_SWAP, CKPT_SWAP, CKPT, CKPT, NONE)
    assert block_modes(6, 2, 3, 2) == (SWAP, CKPT_SWAP, SWAP, CKPT_SWAP, CKPT, NONE)
    assert block_modes(4, 3, 1, 1) == (SWAP, CKPT_SWAP, SWAP, SWAP)
    with pytest.raises(ValueError, match="n_ckpt_swap must be 0 to 3, the number of recomputed blocks, not 4"):
        block_modes(6, 0, 3, 4)


def _counts(**changes: int) -> dict[str, Any]:
    return {"n_persist": 2, "n_buffer": 2, "n_swap": 0, "n_ckpt": 6, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_persist": 9}, "n_persist must be 0 to 8, not 9: all chunks are persistent"),
        ({"n_persist": -1}, "n_persist must be"),
        ({"n_buffer": 0}, "n_buffer must be 1 to 6, not 0: a unit holds up to 1"),
        ({"n_buffer": 7}, "not 7"),
        ({"n_swap": 1}, "n_swap must be 0 to 0, not 1: every block is swapped or checkpointed"),
        ({"n_ckpt_swap": 7}, "n_ckpt_swap must be 0 to 6, not 7: the inputs of every recomputed block"),
        ({"n_ckpt_swap": -1}, "not -1"),
    ],
)
def test_counts_out_of_range_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(make_profile(), machine("8GiB", "8GiB"), **_counts(**changes), chunk_elements=8 * MIB)


def test_a_plan_whose_numbers_contradict_each_other_is_refused() -> None:
    traced, hardware = make_profile(), machine("3GiB", "3GiB")
    plan = evaluate(traced, hardware, **_counts(n_ckpt_swap=3), chunk_elements=8 * MIB)
    assert check(plan, traced, hardware) == plan
    with pytest.raises(ValueError, match="n_chunks=99"):
        check(replace(plan, n_chunks=99), traced, hardware)
    with pytest.raises(ValueError, match="block_modes name 1 blocks"):
        check(replace(plan, block_modes=(NONE,)), traced, hardware)
    with pytest.raises(ValueError, match=r"6 checkpointed, 3 of these with offloaded inputs; .* n_ckpt_swap=2"):
        check(replace(plan, n_ckpt_swap=2), traced, hardware)


def test_the_fingerprint_is_of_the_model_not_of_the_run() -> None:
    traced = make_profile()
    assert fingerprint(traced) == fingerprint(make_profile(saved=7, ms=3.0))
    assert fingerprint(traced) != fingerprint(replace(traced, dtype="float16"))
    assert fingerprint(traced) != fingerprint(make_profile(5))


def test_the_difference_is_named() -> None:
    traced, hardware = make_profile(), machine("3GiB", "3GiB")
    two_groups = replace(traced, parameters=(replace(traced.parameters[0], group=1), *traced.parameters[1:]))
    other_shape = replace(traced.parameters[0], shape=(MIB, 8))
    plan = search(two_groups, hardware)
    refuse_other_model(plan, two_groups)

    def refusal(plan: Plan, profile: ModelProfile, words: str) -> None:
        with pytest.raises(ValueError, match=f"made for another model than M: {words}.*make a new plan"):
            refuse_other_model(plan, profile)

    refusal(plan, replace(two_groups, dtype="float16"), "its dtype differs, bfloat16 in place of float16")
    refusal(plan, make_profile(5), "it has 6 blocks, this one 5")
    reshaped = replace(two_groups, parameters=(other_shape, *two_groups.parameters[1:]))
    refusal(plan, reshaped, "its parameters or their optimizer groups differ")
    refusal(plan, traced, "its parameters or their optimizer groups differ")
    refusal(search(traced, hardware), two_groups, "its optimizer has a single group of parameters, this one several")


def test_a_plan_for_chunked_loss_that_does_not_fit_whole_logits_names_the_loss() -> None:
    whole = make_profile()
    plan = search(replace(whole, chunked_loss=True), machine("3GiB", "3GiB"))

    def refusal(device: str, host: str) -> PlanError:
        with pytest.raises(PlanError) as raised:
            check(plan, whole, machine(device, host))
        return name_other_use(raised.value, plan, whole)

    assert "made for chunked_loss=True, and here logits are whole" in str(refusal("100MiB", "3GiB")), "a GPU's memory"
    assert "chunked_loss" not in str(refusal("3GiB", "100MiB")), "logits take no host memory"


HOSTED = machine("60GiB", "200GiB", host_adam_gparams=5.0, streamed_adam_gparams=None)


def test_the_hosts_rate_is_the_calibrated_one_and_less_beside_copies() -> None:
    profile = make_profile(16, elements=208 * MIB, saved=1300 * MIB, ms=12.0)

    def rate(hardware: HardwareProfile, **changes: int) -> float:
        plan = evaluate(profile, hardware, **{**_counts(n_buffer=4, n_ckpt=16), **changes})
        return host_gparams(plan, profile, hardware)

    alone = replace(HOSTED, h2d_gbps=1e9, d2h_gbps=1e9, bidirectional_gbps=1e9)  # copies take no time
    beside = replace(HOSTED, contention=H100.contention)
    for counts in ({}, {"n_speculate": 8}, {"n_speculate": 8, "n_weight_only": 8}):
        assert rate(alone, **counts) == pytest.approx(5.0)
        assert 2.0 < rate(beside, **counts) < 4.99
    cpu = replace(HOSTED, device_type="cpu", device_bytes=200 * GIB)
    assert rate(cpu) == pytest.approx(5.0), "nothing runs beside it"
    assert rate(cpu, n_persist=evaluate(profile, cpu, **_counts(n_ckpt=16)).n_chunks, n_buffer=0) == 0.0
