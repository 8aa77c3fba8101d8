"""What people read of a calibration: the printed profile, its warnings, and the differences of two calibrations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from protrain.common.tables import aligned, format_bytes, wrapped
from protrain.hardware.calibration.optimizers import ADAM_BYTES
from protrain.hardware.calibration.timing import MIB, Effort
from protrain.hardware.nvml import GpuFacts
from protrain.hardware.profile import Contention, Figure, HardwareProfile

_HEAD = ("", "at", "median", "p20", "p80", "", "of datasheet", "of fastest rank")
_STARVED = 0.6  # of the host's memory bandwidth, which should limit AdamW
_STILL_GROWING = 1.15  # the rate with all threads over the rate with half as many
_UNSTABLE = 1.10  # p80 over p20
_HOST_UNSTABLE = 1.25  # p80 over p20 of the host's AdamW at several moments, which a quiet host keeps at 1.1
_RANK_SLOWER = 0.9  # a rank's rate over that of the fastest rank
_TOLERANCE = 0.05  # of two calibrations in a row
_LARGE_ENOUGH = 0.25  # of full sizes: 256 MiB, more than nearly every cache


def report(profile: HardwareProfile) -> str:
    """The printed form of a profile that ``calibrate`` returned."""
    parts = [_machine(profile), _figures(profile.figures), *_contention(profile.contention)]
    parts += ["", *(wrapped(f"warning: {line}", indent="  ") for line in profile.warnings)] if profile.warnings else []
    return "\n".join(parts)


def _machine(profile: HardwareProfile) -> str:
    driver = "" if profile.driver == "none" else f", driver {profile.driver}"
    memory = f"{format_bytes(profile.device_bytes)} on the device, {format_bytes(profile.host_bytes)} on the host"
    processes = f", {profile.world_size} processes" if profile.world_size > 1 else ""
    return (
        f"{profile.name}{driver}, torch {profile.torch_version}{processes}\n"
        f"{profile.processor}, {profile.cpu_threads} cores; usable memory: {memory}\n"
        f"AdamW on the host is best with {threads_of(profile.host_adam_threads)}\n"
    )


def threads_of(count: int | None) -> str:
    """``count`` threads in words."""
    return "1 thread" if count == 1 else f"{count} threads"


def _figures(figures: Sequence[Figure]) -> str:
    several = any(figure.slowest_over_fastest is not None for figure in figures)
    rows: list[tuple[str, ...]] = [_HEAD if several else _HEAD[:-1]]
    for figure in figures:
        rates = (f"{rate:,.4g}" for rate in (figure.median, figure.p20, figure.p80))
        promised = f"{100 * figure.median / figure.datasheet:.1f}%" if figure.datasheet else ""
        shares = (f"{100 * (figure.slowest_over_fastest or 1):.0f}%",) if several else ()
        rows.append((figure.name, figure.at, *rates, figure.unit, promised, *shares))
    return aligned(rows)


def _contention(groups: Sequence[Contention]) -> list[str]:
    if not groups:
        return []
    rows = [("together", "what is left of each one's rate")]
    for group in groups:
        shares = zip(group.activities, group.shares, strict=True)
        rows.append((" + ".join(group.activities), ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares)))
    return ["", aligned(rows)]


def size_warnings(effort: Effort) -> list[str]:
    """Warns of sizes that fit in caches because time or memory was short."""
    if effort.size >= _LARGE_ENOUGH:
        return []
    why = "so little time" if effort.time < _LARGE_ENOUGH else "so little free memory"
    return [
        f"there was {why} that tensors of {effort.tensor_bytes // MIB} MiB were measured in place of larger ones. "
        "Caches may hold them, and the rates of memory are then too high: calibrate an idle machine for 30 s"
    ]


def kind_warnings(names: Sequence[str]) -> list[str]:
    """Warns of ranks with unlike GPUs, by their names."""
    kinds = list(dict.fromkeys(names))
    if len(kinds) == 1:
        return []
    return [
        f"ranks have unlike GPUs: {' and '.join(kinds)}. All ranks follow one plan, so the least memory and the "
        "slowest rates count: let CUDA_VISIBLE_DEVICES name GPUs of one kind"
    ]


def bf16_warnings(*, has_bf16: bool) -> list[str]:
    """Warns of a card whose matrix products in bf16 are emulated."""
    if has_bf16:
        return []
    return ["the card has no units for bf16, in which products were measured, and torch emulates it: train in float16"]


def link_warnings(loaded: GpuFacts | None) -> list[str]:
    """Warns of a PCI Express link below its width or generation. The facts were read while the card copied."""
    if loaded is None:
        return []
    found = []
    for what, now, most in (
        ("generation", loaded.pcie_generation, loaded.pcie_generation_max),
        ("width", loaded.pcie_width, loaded.pcie_width_max),
    ):
        if now is not None and most is not None and now < most:
            shown = [f"x{value}" if what == "width" else str(value) for value in (now, most)]
            found.append(
                f"the PCI Express link runs at {what} {shown[0]} while it copies, and card and slot allow {shown[1]}: "
                "check slot, riser, firmware settings and other cards on its lanes"
            )
    return found


def clock_warnings(matmul: Figure, loaded: GpuFacts | None) -> list[str]:
    """Warns of slow or unstable clocks. The facts were read during matrix products, whose rate is ``matmul``."""
    found = []
    if loaded is not None and loaded.throttled:
        clocks = f" at {loaded.clock_mhz} of {loaded.clock_max_mhz} MHz" if loaded.clock_mhz else ""
        found.append(f"the card slows itself down{clocks}, by heat or a fault of its supply: check its cooling")
    if matmul.p80 > _UNSTABLE * matmul.p20:
        found.append(
            f"clocks are unstable: matrix products ran at {matmul.p20:.3g} to {matmul.p80:.3g} {matmul.unit}; "
            "check cooling and power limit, and that nothing else runs"
        )
    return found


def thread_warnings(
    by_threads: dict[int, Figure], dram_gbps: float, *, torch_threads: int, cores: int, beside_gpu: bool
) -> list[str]:
    """Warns of too few threads for the host's AdamW.

    Args:
        by_threads: the rate by number of threads.
        dram_gbps: what the host's memory carries.
        torch_threads: how many threads torch was going to use.
        cores: how many cores this process may use.
        beside_gpu: whether the host updates for a GPU, so that its memory should be the limit.
    """
    found = []
    if torch_threads < cores:
        found.append(
            f"torch uses {torch_threads} of the {cores} cores of this process: unset OMP_NUM_THREADS (torchrun sets it "
            f"to 1) or set it to {cores}"
        )
    half = min(by_threads, key=lambda count: abs(2 * count - max(by_threads)))
    full_rate, half_rate = by_threads[max(by_threads)].median, by_threads[half].median
    if beside_gpu and full_rate * ADAM_BYTES < _STARVED * dram_gbps and full_rate > _STILL_GROWING * half_rate:
        found.append(
            f"too few cores: AdamW on the host takes {full_rate * ADAM_BYTES:.0f} of {dram_gbps:.0f} GB/s of memory "
            f"with all {max(by_threads)}, and would be faster with more"
        )
    return found


def host_warnings(moments: Sequence[Figure]) -> list[str]:
    """Warns of a host that others use too, by the rates of its AdamW at several moments of one calibration."""
    slowest = min(figure.p20 for figure in moments)
    fastest = max(figure.p80 for figure in moments)
    if fastest <= _HOST_UNSTABLE * slowest:
        return []
    return [
        f"AdamW on the host ran at {slowest:.3g} to {fastest:.3g} {moments[0].unit}: something else uses its cores or "
        "memory, as neighbours on a shared host do; steps that wait for the host will vary as much"
    ]


def rank_warnings(of_ranks: Sequence[Sequence[Figure]]) -> list[str]:
    """Warns of ranks that are slower than others, by the figures of all ranks, which have measured the same."""
    found: dict[int, list[str]] = {}
    for figures in zip(*of_ranks, strict=True):
        fastest = max(figure.median for figure in figures)
        rank = min(range(len(figures)), key=lambda at: figures[at].median)
        if figures[rank].median < _RANK_SLOWER * fastest:
            found.setdefault(rank, []).append(f"{figures[rank].title} {100 * figures[rank].median / fastest:.0f}%")
    return [
        f"rank {rank} is slower than others, and all wait for the slowest. Of the fastest rank's rate it has: "
        f"{'; '.join(shares)}. Check its card's cooling, slot and NUMA node, and that nothing else runs there"
        for rank, shares in sorted(found.items())
    ]


def pinning_warnings(pinned: Iterable[bool]) -> list[str]:
    """Warns of host memory that the driver refused to pin."""
    if all(pinned):
        return []
    return [
        "host memory cannot be pinned, so that copies are slow and nothing overlaps them: raise the limit of locked "
        "memory (ulimit -l, or --ulimit memlock=-1 of a container)"
    ]


def warnings_of_ranks(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """The warnings of all ranks. One that not all of them have in the same words says whose it is."""
    every = list(dict.fromkeys(itertools.chain(*of_ranks)))
    found = []
    for line in every:
        ranks = [rank for rank, lines in enumerate(of_ranks) if line in lines]
        whose = "" if len(ranks) == len(of_ranks) else f"rank {', '.join(map(str, ranks))}: "
        found.append(f"{whose}{line}")
    return found


def differences(first: HardwareProfile, again: HardwareProfile) -> list[str]:
    """A line for every figure in which two calibrations of one machine differ by more than 5%."""
    before, after = _values(first), _values(again)
    lines = []
    for title, (old, unit) in before.items():
        new, _ = after.get(title, (0.0, unit))
        change = abs(new - old) / max(min(old, new), 1e-12)
        if change > _TOLERANCE:
            lines.append(f"{title}: {old:.4g}, then {new:.4g} {unit} ({100 * (new / max(old, 1e-12) - 1):+.1f}%)")
    return lines


def _values(profile: HardwareProfile) -> dict[str, tuple[float, str]]:
    """Every figure with its unit, by what it is called."""
    return {figure.title: (figure.median, figure.unit) for figure in profile.figures} | {
        f"what {name} keeps in {' + '.join(group.activities)}": (100 * share, "%")
        for group in profile.contention
        for name, share in zip(group.activities, group.shares, strict=True)
    }
