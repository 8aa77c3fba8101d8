"""Profiles that come with ProTrain: those in machines.json, each of a whole machine as it is usually found."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.resources import files
from typing import Any

from protrain.hardware.datasheet import has_words, is_less, of_card
from protrain.hardware.profile import HardwareProfile

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


def load(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """The profile in a JSON file, or the shipped one of a name such as "h100". ValueError when there is neither."""
    text = os.fspath(name_or_path)
    if text.lower() in shipped_names() and not os.path.isfile(text):
        machines = files("protrain.hardware").joinpath("machines.json").read_text(encoding="utf-8")
        return HardwareProfile.from_dict(json.loads(machines)[text.lower()])
    if not os.path.exists(text):
        raise ValueError(f"no hardware profile {text!r}: give a JSON file, or one of {', '.join(shipped_names())}")
    return HardwareProfile.load(text)


_GIB = 1024**3
# By number of GPUs, the hosts of machines with H100s or H200s as they are rented, with 90% of their memory. The names
# are those of the profile's fields. One GPU comes with an eighth of a server, as h100 and h200 have it. AdamW
# is measured on two H200s (calibration-x2.json) and on eight (compare-llama2-13b-8x2048-8gpus.json); that of four, and
# the DRAM of four and eight, lie in between or follow.
_RENTED: dict[int, dict[str, Any]] = {
    2: {"host_bytes": 224 * _GIB, "cpu_threads": 32, "host_dram_gbps": 160.0, "host_adam_gparams": 5.6},
    4: {"host_bytes": 460 * _GIB, "cpu_threads": 64, "host_dram_gbps": 200.0, "host_adam_gparams": 7.0},
    8: {"host_bytes": 504 * _GIB, "cpu_threads": 128, "host_dram_gbps": 240.0, "host_adam_gparams": 8.4},
}
_AS_RENTED = ("h100", "h200")


def of_machine(name_or_path: str | os.PathLike[str], n_gpus: int) -> HardwareProfile:
    """The profile of a whole machine with ``n_gpus``: that of ``load``, with a host as such machines have it.

    Only shipped profiles of cards that are rented in parts of a server have a larger host with more GPUs.
    """
    profile = load(name_or_path)
    if n_gpus == 1 or profile.source != "shipped" or os.fspath(name_or_path).lower() not in _AS_RENTED:
        return profile
    host = next((host for most, host in _RENTED.items() if n_gpus <= most), _RENTED[max(_RENTED)])
    rates = profile.host_adam_scaled(host["host_adam_gparams"] / profile.host_adam_gparams)
    return replace(profile, **host | rates, composed=(*profile.composed, "host_dram_gbps", *rates))


def of_gpu(gpu_name: str) -> HardwareProfile | None:
    """The shipped profile of the GPU that the driver calls ``gpu_name``, or None.

    A card of another form, such as an H100 PCIe, has the rates of its GPU and memory in proportion to the datasheets.
    """
    names = [] if is_less(gpu_name) else [name for card, name in _BY_GPU.items() if has_words(gpu_name, card)]
    if not names:
        return None
    profile = load(names[0])
    here, there = of_card(gpu_name), of_card(profile.name)
    assert here is not None, "every shipped profile has a datasheet"
    assert there is not None, "every shipped profile has a datasheet"
    computing, memory = here.matmul_tflops / there.matmul_tflops, here.memory_gbps / there.memory_gbps
    return replace(
        profile,
        matmul_tflops=profile.matmul_tflops * computing,
        device_copy_gbps=profile.device_copy_gbps * memory,
        device_adam_gparams=profile.device_adam_gparams * memory,
        flatten_gbps=profile.flatten_gbps and profile.flatten_gbps * memory,
    )
