"""What looks wrong with a machine, in lines that say what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protrain.hardware.calibration.effort import MIB, Effort
from protrain.hardware.calibration.optimizers import ADAM_BYTES
from protrain.hardware.nvml import GpuFacts
from protrain.hardware.profile import Figure, HardwareProfile

_STARVED = 0.6  # of the host's memory bandwidth, where AdamW should be limited by it
_STILL_GROWING = 1.15  # all threads over half as many
_UNSTABLE = 1.10  # p80 over p20
_HOST_UNSTABLE = 1.25  # the same, of the host's AdamW at several moments: a quiet host has 1.1
_LARGE_ENOUGH = 0.25  # of full sizes: 256 MiB, more than nearly every cache


def size_doubts(effort: Effort) -> list[str]:
    """About sizes that fit in caches, because time or memory was short."""
    if effort.size >= _LARGE_ENOUGH:
        return []
    why = "so little time" if effort.time < _LARGE_ENOUGH else "so little free memory"
    return [
        f"{why} that tensors of {effort.tensor_bytes // MIB} MiB stood for large ones, which caches may hold: rates of "
        "memory are too high; calibrate an idle machine for 30 s"
    ]


def link_doubts(loaded: GpuFacts | None) -> list[str]:
    """About the PCI Express link of a card, whose facts were read while it copied."""
    if loaded is None:
        return []
    doubts = []
    for what, now, most in (
        ("generation", loaded.pcie_generation, loaded.pcie_generation_max),
        ("width", loaded.pcie_width, loaded.pcie_width_max),
    ):
        if now is not None and most is not None and now < most:
            shown = [f"x{value}" if what == "width" else str(value) for value in (now, most)]
            doubts.append(
                f"the PCI Express link runs at {what} {shown[0]} while it copies, and card and slot allow {shown[1]}: "
                "check slot, riser, firmware settings and other cards on its lanes"
            )
    return doubts


def clock_doubts(matmul: Figure, loaded: GpuFacts | None) -> list[str]:
    """About clocks, from how steady matrix products were and what the card said during them."""
    doubts = []
    if loaded is not None and loaded.throttled:
        clocks = f" at {loaded.clock_mhz} of {loaded.clock_max_mhz} MHz" if loaded.clock_mhz else ""
        doubts.append(f"the card slows itself down{clocks}, by heat or a fault of its supply: check its cooling")
    if matmul.p80 > _UNSTABLE * matmul.p20:
        doubts.append(
            f"clocks are unstable: matrix products ran at {matmul.p20:.3g} to {matmul.p80:.3g} {matmul.unit}; "
            "check cooling and power limit, and that nothing else runs"
        )
    return doubts


def thread_doubts(
    by_threads: dict[int, Figure], dram_gbps: float, *, torch_threads: int, cores: int, beside_gpu: bool
) -> list[str]:
    """About the threads that the host's AdamW has.

    Args:
        by_threads: its rate by number of threads.
        dram_gbps: what the host's memory carries.
        torch_threads: what torch was going to use.
        cores: what this process may use.
        beside_gpu: whether the host updates for a GPU, and its memory should limit it.
    """
    doubts = []
    if torch_threads < cores:
        doubts.append(
            f"torch uses {torch_threads} of the {cores} cores of this process: unset OMP_NUM_THREADS (torchrun sets it "
            f"to 1) or set it to {cores}"
        )
    full, half = by_threads[max(by_threads)].median, by_threads[_nearest_half(by_threads)].median
    if beside_gpu and full * ADAM_BYTES < _STARVED * dram_gbps and full > _STILL_GROWING * half:
        doubts.append(
            f"too few cores: AdamW on the host takes {full * ADAM_BYTES:.0f} of {dram_gbps:.0f} GB/s of memory with "
            f"all {max(by_threads)}, and would be faster with more"
        )
    return doubts


def host_doubts(moments: Sequence[Figure]) -> list[str]:
    """About a host that others use too, from rates of its AdamW at several moments of one calibration."""
    slowest = min(figure.p20 for figure in moments)
    fastest = max(figure.p80 for figure in moments)
    if fastest <= _HOST_UNSTABLE * slowest:
        return []
    return [
        f"AdamW on the host ran at {slowest:.3g} to {fastest:.3g} {moments[0].unit}: something else uses its cores or "
        "memory, as neighbours on a shared host do; steps that wait for the host will vary as much"
    ]


def _nearest_half(by_threads: dict[int, Figure]) -> int:
    return min(by_threads, key=lambda count: abs(2 * count - max(by_threads)))


def pinning_doubts(pinned: Iterable[bool]) -> list[str]:
    """About host memory that the driver refused to pin."""
    if all(pinned):
        return []
    return [
        "host memory can't be pinned, so that copies are slow and nothing overlaps them: raise the limit of locked "
        "memory (ulimit -l, or --ulimit memlock=-1 of a container)"
    ]


def differences(first: HardwareProfile, again: HardwareProfile, *, tolerance: float = 0.05) -> list[str]:
    """A line for every figure in which two calibrations of one machine differ by more than ``tolerance``."""
    values = [_values(profile) for profile in (first, again)]
    lines = []
    for title, before in values[0].items():
        after = values[1].get(title, 0.0)
        change = abs(after - before) / max(min(before, after), 1e-12)
        if change > tolerance:
            lines.append(f"{title}: {before:.4g}, then {after:.4g} ({100 * (after / max(before, 1e-12) - 1):+.1f}%)")
    return lines


def _values(profile: HardwareProfile) -> dict[str, float]:
    figures: Sequence[tuple[str, float]] = [(figure.title, figure.median) for figure in profile.figures]
    shares = [
        (f"share of {name} in {' + '.join(group.activities)}", share)
        for group in profile.contention
        for name, share in zip(group.activities, group.shares, strict=True)
    ]
    return dict([*figures, *shares])
