"""The profile of one of several ranks: its share of the machine, and what collectives and NCCL take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.planning.machines import H100
from tests.planning.models import MACHINE, MIB

TWO = replace(MACHINE, world_size=2, all_gather_gbps=1.28, all_to_all_gbps=1.28)


def test_rates_of_collectives_count_the_whole_tensor() -> None:
    """Measured rates of collectives count what a rank receives. The link to the host stands in for unmeasured ones."""
    assert MACHINE.gather_gbps == MACHINE.reduce_gbps == float("inf"), "a rank alone has all there is"
    assert replace(TWO, world_size=4, all_gather_gbps=3.0).gather_gbps == pytest.approx(4.0)
    assert replace(TWO, world_size=4, all_to_all_gbps=6.0).reduce_gbps == pytest.approx(8.0)
    unknown = replace(TWO, world_size=2, all_gather_gbps=None, all_to_all_gbps=None, h2d_gbps=10.0, d2h_gbps=20.0)
    assert (unknown.gather_gbps, unknown.reduce_gbps) == (20.0, 40.0)


def test_ranks_of_a_machine_share_its_host() -> None:
    whole = replace(MACHINE, host_bytes=90, cpu_threads=7, host_adam_weight_gparams=None, host_adam_narrow_gparams=0.9)
    one = whole.shared_by(3)
    assert (one.world_size, one.host_bytes, one.cpu_threads) == (3, 30, 2)
    assert one.host_adam_gparams == pytest.approx(whole.host_adam_gparams / 3)
    assert one.host_dram_gbps == pytest.approx(whole.host_dram_gbps / 3)
    assert one.host_adam_narrow_gparams == pytest.approx(0.3)
    assert one.host_adam_weight_gparams is None
    assert (one.device_bytes, one.h2d_gbps) == (whole.device_bytes, whole.h2d_gbps), "a GPU's own"
    assert whole.shared_by(1) == whole
    measured = replace(whole, world_size=2).shared_by(2)  # by two processes at once: their rates are shares already
    assert (measured.host_bytes, measured.host_adam_gparams) == (45, whole.host_adam_gparams)
    measured = replace(whole, world_size=6, n_nodes=2).shared_by(3, 2)  # by three on each of two machines
    assert (measured.host_bytes, measured.host_adam_gparams) == (30, whole.host_adam_gparams)


def test_a_rank_copies_no_faster_than_its_share_of_the_dram() -> None:
    whole = replace(MACHINE, host_dram_gbps=60.0, h2d_gbps=20.0, d2h_gbps=18.0, bidirectional_gbps=35.0)
    two, four = whole.shared_by(2), whole.shared_by(4)
    assert (two.h2d_gbps, two.d2h_gbps, two.bidirectional_gbps) == (20.0, 18.0, 30.0)
    assert (four.h2d_gbps, four.d2h_gbps, four.bidirectional_gbps) == (15.0, 15.0, 15.0)


def test_nodes_share_nothing_but_the_network() -> None:
    """A gather brings what a machine lacks once for all of its GPUs, an exchange brings other values for each."""
    whole = replace(MACHINE, host_bytes=90, cpu_threads=8, all_gather_gbps=9.0, all_to_all_gbps=2.0)
    known = replace(whole, network_gbps=8.0, composed=("network_gbps",))
    one = known.shared_by(2, 3)
    assert (one.world_size, one.n_nodes, one.host_bytes, one.cpu_threads) == (6, 3, 45, 4)
    assert one.host_adam_gparams == pytest.approx(whole.host_adam_gparams / 2)
    assert one.gather_gbps == pytest.approx(8.0 * 6 / 5)
    assert one.reduce_gbps == pytest.approx(2.0 * 6 / 5), "the network is not what slows this down"
    assert [one.known(name) for name in ("all_gather_gbps", "all_to_all_gbps")] == ["composed", "measured"]
    assert known.shared_by(2).all_gather_gbps == 9.0
    # One of four ranks on two machines sends two thirds of its values to the other machine. Links to host memory stand
    # in for those of GPUs.
    unknown = replace(known, all_gather_gbps=None, all_to_all_gbps=None, h2d_gbps=4.0, d2h_gbps=7.0).shared_by(2, 2)
    assert unknown.all_gather_gbps is None
    assert unknown.all_to_all_gbps == pytest.approx(6.0)
    with pytest.raises(ValueError, match=r"network_gbps of .* must be known for several machines"):
        whole.shared_by(2, 2)


def test_what_nccl_takes_depends_on_the_ranks_of_a_machine_and_on_how_they_are_connected() -> None:
    fast = replace(H100, all_gather_gbps=268.0)
    through_host = replace(H100, all_gather_gbps=H100.h2d_gbps / 2)
    several: dict[str, Any] = {"world_size": 16, "n_nodes": 2}
    assert [replace(fast, world_size=n).collective_bytes // MIB for n in (1, 2, 4, 8)] == [0, 1784, 2552, 4088]
    assert replace(fast, **several).collective_bytes == replace(fast, world_size=8).collective_bytes
    assert replace(through_host, **several).collective_bytes == 600 * MIB
