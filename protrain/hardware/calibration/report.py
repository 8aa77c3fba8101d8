"""What people read of a calibration: the printed profile, and the warnings of what slows a machine down."""

from __future__ import annotations

from collections.abc import Sequence

from protrain.common.tables import aligned, format_bytes, wrapped
from protrain.hardware.calibration.timing import MIB, Effort
from protrain.hardware.nvml import GpuFacts
from protrain.hardware.profile import RATE_UNITS, HardwareProfile
from protrain.hardware.shipped import of_card

_ADAM_BYTES = 26  # read and written a parameter, bf16 with the split master
_LARGE_ENOUGH = 0.25  # of full sizes: 256 MiB, more than nearly every cache
NOT_PINNED = (
    "host memory cannot be pinned, so that copies are slow and nothing overlaps them: raise the limit of locked memory "
    "(ulimit -l, or --ulimit memlock=-1 of a container)"
)


def report(profile: HardwareProfile) -> str:
    """The printed form of a profile that ``calibrate`` returned."""
    driver = "" if profile.driver == "none" else f", driver {profile.driver}"
    processes = f", {profile.world_size} processes" if profile.world_size > 1 else ""
    threads = "1 thread" if profile.host_adam_threads == 1 else f"{profile.host_adam_threads} threads"
    sheet = of_card(profile.name)
    promised: dict[str, float] = {}
    if sheet is not None:
        promised = {
            "device_copy_gbps": sheet.memory_gbps,
            "device_adam_gparams": sheet.memory_gbps / _ADAM_BYTES,
            "matmul_tflops": sheet.matmul_tflops,
        }
    rows = [("measured", "", "of datasheet")]
    for name, value in profile.rows():
        if name.endswith(RATE_UNITS):
            share = f"{100 * getattr(profile, name) / promised[name]:.1f}%" if name in promised else ""
            rows.append((name, value, share))
    groups = [("together", "what is left of each one's rate")]
    for group in profile.contention:
        shares = zip(group.activities, group.shares, strict=True)
        groups.append((" + ".join(group.activities), ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares)))
    return "\n".join(
        (
            f"{profile.name}{driver}, torch {profile.torch_version}{processes}",
            f"{profile.processor}, {profile.cpu_threads} cores; usable memory: {format_bytes(profile.device_bytes)} on "
            f"the device, {format_bytes(profile.host_bytes)} on the host",
            f"AdamW on the host has {threads}\n",
            aligned(rows),
            *(["", aligned(groups)] if profile.contention else []),
            *([""] if profile.warnings else []),
            *(wrapped(f"warning: {line}", indent="  ") for line in profile.warnings),
        )
    )


def machine_warnings(effort: Effort, names: Sequence[str]) -> list[str]:
    """Warns of what slows the planned training down, or makes the rates wrong, before anything is measured.

    Args:
        effort: the sizes that are measured.
        names: of the devices of all ranks.
    """
    found, kinds = [], list(dict.fromkeys(names))
    if effort.size < _LARGE_ENOUGH:
        why = "so little time" if effort.time < _LARGE_ENOUGH else "so little free memory"
        found.append(
            f"there was {why} that tensors of {effort.tensor_bytes // MIB} MiB were measured in place of larger ones. "
            "Caches may hold them, and the rates of memory are then too high: calibrate an idle machine for 30 s"
        )
    if len(kinds) > 1:
        found.append(
            f"ranks have unlike GPUs: {' and '.join(kinds)}. All ranks follow one plan, so the least memory and the "
            "slowest rates count: let CUDA_VISIBLE_DEVICES name GPUs of one kind"
        )
    return found


def card_warnings(loaded: GpuFacts | None) -> list[str]:
    """Warns of a card that slows itself down, and of a PCI Express link below its width or generation.

    The facts were read while the card computed and copied.
    """
    if loaded is None:
        return []
    slow = ["the card slows itself down, by heat or a fault of its supply: check its cooling"]
    return slow * loaded.throttled + [
        f"the PCI Express link runs at {what}{now} while it copies, and card and slot allow {prefix}{most}: "
        "check slot, riser, firmware settings and other cards on its lanes"
        for what, prefix, now, most in (
            ("generation ", "", loaded.pcie_generation, loaded.pcie_generation_max),
            ("width x", "x", loaded.pcie_width, loaded.pcie_width_max),
        )
        if now is not None and most is not None and now < most
    ]


def warnings_of_all(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """The warnings of all ranks, each once. Those that not every rank has name the rank."""
    return list(
        dict.fromkeys(
            line if all(line in each for each in of_ranks) else f"rank {rank}: {line}"
            for rank, lines in enumerate(of_ranks)
            for line in lines
        )
    )
