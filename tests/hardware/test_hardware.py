"""The machine: shipped profiles, and what is read from the system."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protrain.hardware import memory
from protrain.hardware.detection import assume, detect
from protrain.hardware.memory import available_host_bytes, for_training, update_threads, usable_cores
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import load, next_card, of_card, of_gpu, of_machine, shipped_name, shipped_names
from tests.planning.models import H100, MACHINE, MIB, TWO

GIB = 1024**3
COLLECTIVES = ("all_gather_gbps", "all_to_all_gbps")


@pytest.mark.parametrize("name", [*shipped_names(), "H100"])
def test_shipped_profiles_are_plausible(name: str) -> None:
    profile = load(name)
    assert profile.source == "shipped"
    assert of_gpu(profile.name) == profile, "a card of this name has its rates"
    assert profile.device_type == "cuda"
    assert 16 * GIB < profile.device_bytes < profile.device_copy_gbps * GIB
    assert profile.bidirectional_gbps <= profile.h2d_gbps + profile.d2h_gbps
    # AdamW is bound by memory: 28 bytes a parameter on the device, 26 on the host.
    assert profile.device_adam_gparams * 28 == pytest.approx(profile.device_copy_gbps, rel=0.25)
    assert profile.host_adam_gparams * 26 < profile.host_dram_gbps * 1.1


@pytest.mark.parametrize("n_gpus", [1, 8])
def test_a_file_goes_before_a_shipped_profile_of_its_name(
    n_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h200").mkdir()
    assert load("h200").source == "shipped"
    mine = replace(load("h100"), source="measured", host_bytes=64 * GIB)
    mine.save(tmp_path / "h100")
    assert of_machine("h100", n_gpus) == mine


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_these_figures_are_the_measured_ones(gpu: str) -> None:
    recorded = HardwareProfile.load(Path(__file__).parents[2] / f"bench/results/{gpu}/calibration.json")
    shipped = load(gpu)
    collectives = {name: getattr(shipped, name) for name in (*COLLECTIVES, "network_gbps", "composed", "contention")}
    assert shipped == replace(recorded, source="shipped", warnings=(), **collectives)
    assert recorded.source == "measured"
    pairs = tuple(group for group in recorded.contention if len(group.activities) == 2)
    assert pairs == shipped.contention[:-1]
    assert shipped.contention[-1].activities == ("collective", "matmul")


def test_collectives_of_shipped_profiles_are_measured_or_follow_from_datasheets() -> None:
    h100, h200, a100 = (load(name) for name in ("h100", "h200", "a100"))
    pair = HardwareProfile.load(Path(__file__).parents[2] / "bench/results/h200/calibration-x2.json")
    for name in COLLECTIVES:
        assert getattr(h200, name) == getattr(pair, name)
        assert getattr(a100, name) == pytest.approx(getattr(h100, name) * 300 / 450, rel=0.01)  # of NVLink, one way
    assert [h100.known(name) for name in COLLECTIVES] == ["measured", "composed"]
    assert [a100.known(name) for name in ("matmul_tflops", "streamed_adam_gparams")] == ["composed", "assumed"]


PARTS = ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "GRID A100D-10C", "NVIDIA L40S-12Q", "NVIDIA GeForce RTX 4090 D"]
SLOWER = ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA H20", "NVIDIA RTX A1000"]


@pytest.mark.parametrize("name", [*PARTS, *SLOWER, "Tesla T4"])
def test_a_part_of_a_card_or_a_slower_one_has_not_the_rates_of_the_whole(name: str) -> None:
    assert of_gpu(name) is of_card(name) is None


@pytest.mark.parametrize(
    ("name", "shipped", "computing", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 1.0, 1.0),
        ("NVIDIA H100 PCIe", "h100", 756 / 989, 2000 / 3350),
        ("NVIDIA GH200 480GB", "h100", 1.0, 4000 / 3350),
        ("NVIDIA GH200 144G HBM3e", "h100", 1.0, 4900 / 3350),
        ("NVIDIA GB200", "b200", 1.0, 1.0),
        ("NVIDIA A100-PCIE-40GB", "a100", 1.0, 1555 / 2039),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090", 80 / 71, 1008 / 936),
    ],
)
def test_cards_of_one_name_have_rates_in_proportion(name: str, shipped: str, computing: float, memory: float) -> None:
    found, base = of_gpu(name), load(shipped)
    assert found is not None
    assert found.matmul_tflops == pytest.approx(base.matmul_tflops * computing)
    for rate in ("device_copy_gbps", "device_adam_gparams"):
        assert getattr(found, rate) == pytest.approx(getattr(base, rate) * memory)
    assert found.h2d_gbps == base.h2d_gbps


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``card(name, free_bytes, is_integrated)``: the GPU that is found here."""

    def found(name: str, free_bytes: int = 70 * GIB, *, is_integrated: bool = False) -> None:
        properties = SimpleNamespace(is_integrated=is_integrated, multi_processor_count=48)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free_bytes, 80 * GIB))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 0)
        monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 0)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
        monkeypatch.setattr("protrain.hardware.detection.available_host_bytes", lambda: 100 * GIB)

    return found


def test_what_is_found_of_a_card(card: Callable[..., None]) -> None:
    """Memory that GPU and host share counts once, and a known card is not known to be connected as elsewhere."""
    card("NVIDIA GB10", 95 * GIB, is_integrated=True)
    shared = assume(torch.device("cuda"))
    assert (shared.device_bytes, shared.host_bytes) == (45 * GIB, 45 * GIB)
    card("NVIDIA GB10", 20 * GIB, is_integrated=True)
    assert 19 * GIB < assume(torch.device("cuda")).device_bytes < 20 * GIB
    card("NVIDIA H100 80GB HBM3")
    apart = assume(torch.device("cuda"))
    assert apart.device_bytes > 69 * GIB
    assert apart.host_bytes == 90 * GIB
    assert apart.matmul_tflops == load("h100").matmul_tflops
    assert [getattr(apart, name) for name in (*COLLECTIVES, "network_gbps")] == [None] * 3
    assert apart.contention == load("h100").contention[:-1]


def test_cards_rented_in_parts_of_a_server_have_a_larger_host_with_more_gpus() -> None:
    one, two, three, eight = (of_machine("h100", n_gpus) for n_gpus in (1, 2, 3, 8))
    assert one.name == "NVIDIA H100 80GB HBM3 in a machine with 128 GiB of RAM (assumed)"
    assert replace(one, name=load("h100").name, host_bytes=load("h100").host_bytes) == load("h100")
    assert one.host_bytes < two.host_bytes < three.host_bytes < eight.host_bytes < 2048 * GIB
    assert eight.host_adam_gparams == pytest.approx(8.4)
    assert one.host_adam_weight_gparams is not None
    assert eight.host_adam_weight_gparams == pytest.approx(one.host_adam_weight_gparams * 8.4 / one.host_adam_gparams)
    assert [each.known("host_adam_gparams") for each in (one, eight)] == ["measured", "composed"]
    assert eight.h2d_gbps == one.h2d_gbps
    assert of_machine("a100", 4).host_adam_gparams == load("a100").host_adam_gparams


def test_hosts_leave_room_for_the_system() -> None:
    for name in shipped_names():
        assert of_machine(name, 1).host_bytes == pytest.approx(load(name).host_bytes, rel=0.02), "one truth"
    given = of_machine("rtx3090", 1, ram_bytes=128 * GIB)
    assert given.name.endswith("in a machine with 128 GiB of RAM (as given)")
    assert given.host_bytes == for_training(128 * GIB, 1) == pytest.approx(112.5 * GIB)
    assert for_training(128 * GIB, 2) < for_training(128 * GIB, 1)
    assert 0 < for_training(2 * GIB, 8) < 2 * GIB


def test_a_card_is_found_by_the_names_that_people_and_drivers_write() -> None:
    for name in ("3090", "RTX 3090", "rtx-3090", "NVIDIA GeForce RTX 3090", "GeForce RTX3090"):
        assert load(name) == load("rtx3090")
    assert shipped_name("RTX 3080") is None
    cards = "NVIDIA GeForce RTX 3090", "NVIDIA H100 80GB HBM3", "CPU with 2 cores"
    assert [next_card(card) for card in cards] == ["rtx4090", "h200", None]


def test_a_profile_is_loaded_from_a_file_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    load("a100").save(path)
    assert load(path) == load("a100")
    with pytest.raises(ValueError, match="no hardware profile 'b300': give a JSON file, or one of a100, a10g"):
        load("b300")
    cards = ["a100", "a10g", "b200", "h100", "h200", "l40s", "mi300x", "rtx3090", "rtx4090", "rtx5090"]
    assert shipped_names() == cards
    assert [name for name in cards if load(name).rates == "measured"] == ["h100", "h200"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"h2d_gbps": 0}, r"HardwareProfile\.h2d_gbps must be a finite number above 0, not 0\.0"),
        ({"matmul_tflops": float("nan")}, r"matmul_tflops must be a finite number less than 2\*\*63, not nan"),
        ({"streamed_adam_gparams": 0.0}, r"streamed_adam_gparams must be a finite number above 0, or null, not 0\.0"),
        ({"device_bytes": -1}, r"device_bytes must be at least 0, not -1"),
        ({"host_bytes": 10**20}, r"host_bytes must be a finite number less than 2\*\*63, not 1"),
        ({"cpu_threads": 0}, r"cpu_threads must be at least 1, not 0"),
        ({"host_adam_threads": 0}, r"host_adam_threads must be at least 1, not 0"),
        ({"device_type": "tpu"}, r"device_type must be cuda or cpu, not 'tpu'"),
        (
            {"contention": [{"activities": ["h2d"], "shares": [0]}]},
            r"Contention\.shares must be finite numbers above 0",
        ),
        ({"contention": [{"activities": ["h2d"], "shares": []}]}, r"Contention has 0 shares for 1 activities"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_impossible_figure_is_named_with_its_file(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(load("h100").to_dict() | change))
    with pytest.raises(ValueError, match=rf"mine\.json is not a hardware profile .*{words}.*; `protrain calibrate"):
        load(path)


def test_sizes_are_read_and_can_be_overridden() -> None:
    found = detect("cpu", device_memory="24MiB", host_memory=GIB)
    assert (found.device_bytes, found.host_bytes) == (24 * 1024**2, GIB)
    assert found.source == "detected"
    assert found.cpu_threads == usable_cores() >= 1
    default = detect("cpu")
    assert 0 < default.device_bytes + default.host_bytes <= available_host_bytes() * 1.5
    with pytest.raises(ValueError, match="device_memory must be a number of bytes or text"):
        detect("cpu", device_memory="lots")
    with pytest.raises(ValueError, match="must be a CUDA GPU or the CPU, not meta"):
        detect("meta")


Write = Callable[[dict[str, str]], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Let a folder stand for the root of the system, and write files there."""
    monkeypatch.setattr(memory, "_ROOT", tmp_path)

    def run(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return run


GROUP, FIRST = "sys/fs/cgroup", "sys/fs/cgroup/memory/box/memory"  # of version 2, and of version 1
SAID = {"proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n"}
NESTED = {
    "proc/self/cgroup": "0::/outer/inner\n",
    **{f"{GROUP}/outer/memory.max": str(4 * GIB), f"{GROUP}/outer/memory.current": str(3 * GIB)},
    f"{GROUP}/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    **{f"{GROUP}/outer/inner/memory.max": "max\n", f"{GROUP}/outer/inner/memory.current": "7"},
}
EARLIER = {
    "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/box\n",
    **{f"{FIRST}.limit_in_bytes": str(GIB), f"{FIRST}.usage_in_bytes": str(GIB // 4)},
    f"{FIRST}.stat": "total_inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("files", "available_bytes"),
    [
        (SAID | NESTED, 2 * GIB),
        (SAID | EARLIER, GIB - GIB // 4),
        ({"proc/meminfo": "MemAvailable: 1024 kB\n"}, 1024**2),
        ({}, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
    ],
    ids=["the least group", "version 1", "no groups", "nothing said"],
)
def test_memory_is_the_least_that_system_and_control_groups_leave(
    write: Write, files: dict[str, str], available_bytes: int
) -> None:
    write(files)
    assert available_host_bytes() == available_bytes


ALLOWED = usable_cores()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/pod/box\n", f"{GROUP}/pod/cpu.max": "250000 100000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "99900000 100000\n"}, ALLOWED),
        (
            {
                "proc/self/cgroup": "9:memory:/box\n5:cpu,cpuacct:/box\n",
                **{
                    f"{GROUP}/cpu/box/cpu.cfs_{name}_us": f"{us}\n"
                    for name, us in (("quota", 200000), ("period", 100000))
                },
                f"{GROUP}/memory/box/cpu.cfs_quota_us": "100000\n",
            },
            2,
        ),
        ({"proc/self/cgroup": "5:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, ALLOWED),
    ],
)
def test_no_more_cores_than_control_groups_grant(write: Write, files: dict[str, str], cores: float) -> None:
    write(files)
    assert usable_cores() == min(ALLOWED, int(cores))


def test_beside_a_gpu_two_cores_are_left_to_others() -> None:
    assert [update_threads(cores, beside_gpu=True) for cores in (1, 2, 3, 16)] == [1, 1, 1, 14]
    assert [update_threads(cores, beside_gpu=False) for cores in (1, 2, 16)] == [1, 1, 8]


def test_a_processor_is_named_as_the_system_names_it(write: Write) -> None:
    write({})
    assert memory.processor_name() in (platform.processor(), platform.machine())
    write({"proc/cpuinfo": "processor\t: 0\nmodel name\t: A: processor\nmodel name\t: another\n"})
    assert memory.processor_name() == "A: processor"


@pytest.mark.gpu
def test_a_card_has_no_more_memory_than_it_has() -> None:
    with pytest.raises(ValueError, match="is more than the"):
        detect("cuda", device_memory="9TiB")


# -- one of several ranks ----------------------------------------------------------------------------------------------


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
