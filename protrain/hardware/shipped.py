"""Rates that nobody has to measure: datasheets of cards, and the profiles of whole machines in machines.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from protrain.common.tables import format_bytes
from protrain.hardware.memory import HOST_SHARE, for_training
from protrain.hardware.profile import HardwareProfile

_Value = TypeVar("_Value")


class Datasheet(NamedTuple):
    """Peak rates of one card, as its maker promises them. Matmul is dense bf16 with fp32 accumulation, no sparsity."""

    matmul_tflops: float
    memory_gbps: float


# Sources: NVIDIA's datasheets of H100 (SXM, PCIe), H200, GH200, B200, A100 (40 GB, 80 GB; SXM, PCIe) and L40S, its
# whitepapers of GA102, Ada and RTX Blackwell, AWS's page of G5 instances for A10G, and AMD's datasheet of MI300X.
#
# TFLOP/s and GB/s by what the driver's name of the card has, as whole words in any order. The first row that fits
# counts, so special cards come first.
_CARDS: dict[str, tuple[float, float]] = {
    "H100 PCIe": (756, 2000),
    "H100 NVL": (835, 3900),
    "H100": (989, 3350),
    "GH200 144G": (989, 4900),
    "GH200": (989, 4000),
    "H200 NVL": (835, 4800),
    "H200": (989, 4800),
    "A100 40GB": (312, 1555),
    "A100 PCIE 80GB": (312, 1935),
    "A100": (312, 2039),
    "B200": (2250, 8000),
    "GB200": (2250, 8000),
    "MI300X": (1307, 5300),
    "L40S": (362, 864),
    "A10G": (70, 600),
    "RTX 5090": (209.5, 1792),
    "RTX 4090": (165.2, 1008),
    "RTX 3090 Ti": (80, 1008),
    "RTX 3090": (71, 936),
}
# Names of parts of a card (MIG slices, and virtual GPUs such as "A100-10C") and of slower cards.
_LESS = re.compile(r"\bMIG\b|-\d+[ABCQ]$|\bLAPTOP\b|\bMAX-Q\b|\bD\b")


def of_card(name: str) -> Datasheet | None:
    """The datasheet of the card that the driver calls ``name``, or None where it is not known.

    It is not that of a part of a card, or of a slower one, whose names have that of the whole or faster card in them.
    """
    for words, rates in _CARDS.items():
        if all(has_words(name, word) for word in words.split()) and not _LESS.search(name.upper()):
            return Datasheet(*rates)
    return None


def has_words(name: str, text: str) -> bool:
    """Whether ``text`` is in the name of a card as whole words. An RTX A1000 is no A100."""
    return re.search(rf"\b{re.escape(text)}\b", name, re.IGNORECASE) is not None


# From what the name of a GPU contains to its profile. A GH200 has the GPU of an H100. docs/new-gpu.md says where the
# figures come from.
_BY_GPU = {
    **{"H100": "h100", "GH200": "h100", "H200": "h200", "B200": "b200", "GB200": "b200", "A100": "a100"},
    **{"A10G": "a10g", "L40S": "l40s"},
    **{"RTX 3090": "rtx3090", "RTX 4090": "rtx4090", "RTX 5090": "rtx5090", "MI300X": "mi300x"},
}


def shipped_names() -> list[str]:
    """The names that ``load`` takes without a file."""
    return sorted(set(_BY_GPU.values()))


def shipped_name(text: str) -> str | None:
    """The shipped profile that people mean by ``text``, such as "RTX 3090", "3090" or "H100". None: there is none."""
    return next((name for name in shipped_names() if _plain(name) == _plain(text)), None)


def _name_of(gpu_name: str) -> str | None:
    """The shipped profile of a card that the driver calls ``gpu_name``, or of the card that this is a form of."""
    return next((name for card, name in _BY_GPU.items() if has_words(gpu_name, card)), None)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|rtx|amd|instinct|[\s_-]", "", name.lower())


def load(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """The profile in a JSON file, or the shipped one of a name such as "h100". ValueError when there is neither."""
    text = os.fspath(name_or_path)
    name = shipped_name(text)
    if name and not os.path.isfile(text):
        machines = files("protrain.hardware").joinpath("machines.json")
        return HardwareProfile.from_dict(json.loads(machines.read_text(encoding="utf-8"))[name])
    if not os.path.exists(text):
        raise ValueError(
            f"no hardware profile {text!r}: give a JSON file, or one of {', '.join(shipped_names())}; --gpus N takes "
            "several"
        )
    return HardwareProfile.load(text)


_GIB = 1024**3
MORE_RAM_BYTES = 64 * _GIB
MOST_GPUS = 8  # of a machine
# The RAM in GiB of machines with so many GPUs or fewer: of desktops for RTX cards, else of machines that are rented.
_RAM_GIB = {
    "rtx3090": {8: 64},
    "rtx4090": {8: 128},
    "rtx5090": {8: 128},
    "a10g": {1: 128, 4: 192, 8: 768},  # g5
    "l40s": {1: 128, 4: 384, 8: 1536},  # g6e
    "a100": {1: 220, 2: 440, 4: 880, 8: 1152},  # NC A100 v4, p4de.24xlarge
    "h100": {1: 128, 2: 256, 4: 512, 8: 1740},  # those that were measured, a3-highgpu-8g
    "h200": {1: 128, 2: 256, 4: 512, 8: 2048},  # those that were measured, p5en.48xlarge
    "b200": {1: 256, 2: 512, 4: 1024, 8: 2048},  # p6-b200.48xlarge and, assumed, parts of it
    "mi300x": {1: 231, 2: 462, 4: 925, 8: 1850},  # ND MI300X v5 and, assumed, parts of it
}
# By number of GPUs, the hosts of machines with H100s or H200s as they are rented. The names are those of the profile's
# fields. One GPU comes with an eighth of a server, as h100 and h200 have it. AdamW is measured on two H200s
# (calibration-x2.json) and on eight (compare-llama2-13b-8x2048-8gpus.json); that of four, and the DRAM of four and
# eight, lie in between or follow.
_RENTED: dict[int, dict[str, Any]] = {
    2: {"cpu_threads": 32, "host_dram_gbps": 160.0, "host_adam_gparams": 5.6},
    4: {"cpu_threads": 64, "host_dram_gbps": 200.0, "host_adam_gparams": 7.0},
    8: {"cpu_threads": 128, "host_dram_gbps": 240.0, "host_adam_gparams": 8.4},
}


def of_machine(name_or_path: str | os.PathLike[str], n_gpus: int, *, ram_bytes: int | None = None) -> HardwareProfile:
    """The profile of a whole machine with ``n_gpus``: that of ``load``, with a host as such machines have it.

    A machine of a shipped profile has the RAM with which it is sold or rented, unless ``ram_bytes`` says how much it
    has. The profile is named with its RAM, and takes what that leaves for training. Only shipped profiles of cards that
    are rented in parts of a server have a faster host with more GPUs.
    """
    profile, known = load(name_or_path), "as given"
    name = shipped_name(os.fspath(name_or_path)) if profile.source == "shipped" else None
    if ram_bytes is None and name is not None:
        ram_bytes, known = _of_size(_RAM_GIB[name], n_gpus) * _GIB, "assumed"
    if ram_bytes is not None:
        profile = replace(
            profile,
            name=f"{profile.name} in a machine with {format_bytes(ram_bytes)} of RAM ({known})",
            host_bytes=for_training(ram_bytes, n_gpus),
        )
    if n_gpus == 1 or name not in ("h100", "h200"):
        return profile
    host = _of_size(_RENTED, n_gpus)
    rates = profile.host_adam_scaled(host["host_adam_gparams"] / profile.host_adam_gparams)
    return replace(profile, **host | rates, composed=(*profile.composed, "host_dram_gbps", *rates))


def _of_size(by_size: Mapping[int, _Value], n_gpus: int) -> _Value:
    """What ``by_size`` has for machines with so many GPUs: that of the smallest which has as many, or the largest."""
    return by_size[next((size for size in by_size if n_gpus <= size), max(by_size))]


# The cards that people would buy or rent one after the other, by their shipped profiles.
_LADDERS = (
    ("rtx3090", "rtx4090", "rtx5090", "h100", "h200", "b200"),
    ("a10g", "l40s", "h100", "h200", "b200"),
    ("a100", "h100", "h200", "b200"),
)


def next_card(gpu_name: str, least_bytes: int = 0) -> str | None:
    """The shipped profile of the next card with ``least_bytes`` after the one that the driver calls ``gpu_name``.

    If none has as much, it is the last. None: no card is known to come next.
    """
    name = _name_of(gpu_name)
    later = next((ladder[ladder.index(name) + 1 :] for ladder in _LADDERS if name in ladder), ())
    large = [card for card in later if load(card).device_bytes >= least_bytes]
    return next(iter(large or later[-1:]), None)


def other_machines(hardware: HardwareProfile) -> dict[str, HardwareProfile]:
    """The machine of ``hardware``, one of its GPUs, with more memory, with the next card, and with twice the GPUs."""
    n_gpus = hardware.world_size // hardware.n_nodes
    whole = replace(
        hardware,
        host_bytes=hardware.host_bytes * n_gpus,
        cpu_threads=hardware.cpu_threads * n_gpus,
        host_dram_gbps=hardware.host_dram_gbps * n_gpus,
        world_size=1,
        n_nodes=1,
        **hardware.host_adam_scaled(n_gpus),
    )
    larger = replace(hardware, host_bytes=hardware.host_bytes + int(MORE_RAM_BYTES * HOST_SHARE) // n_gpus)
    machines = {f"{format_bytes(MORE_RAM_BYTES)} more RAM": larger}
    name = next_card(hardware.name)
    if name is not None:
        card = replace(
            load(name),
            host_bytes=whole.host_bytes,
            cpu_threads=whole.cpu_threads,
            host_dram_gbps=whole.host_dram_gbps,
            **whole.host_adam_scaled(1.0),
        )
        machines[f"the next card ({name})"] = card.shared_by(n_gpus, hardware.n_nodes)
    if hardware.device_type == "cuda" and 2 * n_gpus <= MOST_GPUS:
        machines[f"{2 * n_gpus} GPUs"] = whole.shared_by(2 * n_gpus, hardware.n_nodes)
    return machines


def of_gpu(gpu_name: str) -> HardwareProfile | None:
    """The shipped profile of the GPU that the driver calls ``gpu_name``, or None.

    A card of another form, such as an H100 PCIe, has the rates of its GPU and memory in proportion to the datasheets.
    """
    name, here = _name_of(gpu_name), of_card(gpu_name)
    if name is None or here is None:
        return None
    profile = load(name)
    there = of_card(profile.name)
    assert there is not None, "every shipped profile has a datasheet"
    computing, memory = here.matmul_tflops / there.matmul_tflops, here.memory_gbps / there.memory_gbps
    return replace(
        profile,
        matmul_tflops=profile.matmul_tflops * computing,
        device_copy_gbps=profile.device_copy_gbps * memory,
        device_adam_gparams=profile.device_adam_gparams * memory,
    )
