"""The schema of results: one row for one implementation of one operator at one shape and type."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from bench.train.options import commit_of_checkout, device_name
from protrain.common.records import Record
from protrain.hardware.nvml import driver_version
from protrain.profiler.kept_profiles import version_of

OURS = "protrain"
EAGER = "eager torch"
COMPILED = "torch.compile"


@dataclass(frozen=True, kw_only=True)
class Machine(Record):
    """The machine and the software that a row was measured with."""

    gpu: str  # "none" without one
    driver: str
    cpu: str
    torch: str
    triton: str
    commit: str  # with "+" where the sources differ from it


@functools.cache
def this_machine() -> Machine:
    """The machine at hand."""
    has_gpu = torch.cuda.is_available()
    return Machine(
        gpu=torch.cuda.get_device_name() if has_gpu else "none",
        driver=driver_version(torch.device("cuda" if has_gpu else "cpu")),
        cpu=device_name(torch.device("cpu")),
        torch=torch.__version__,
        triton=version_of("triton"),
        commit=commit_of_checkout(),
    )


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """A measured implementation. Figures are None where correctness is red, or where nothing is timed.

    GB/s counts the bytes that the operator has to move, whatever an implementation moves besides, so that rates of one
    operator compare.
    """

    operator: str
    shape: str
    dtype: str
    implementation: str
    version: str  # of the package that brings it
    verdict: str  # of the check in the same process, before the timing; starts with "RED" when it failed
    bytes: int  # read and written by one call, at least
    flops: int
    roof: str  # what limits the operator: "device copy", "PCIe one way", "host DRAM"
    roof_gbps: float | None = None  # measured in the same run
    datasheet_gbps: float | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    rounds: int = 0
    host_us: float | None = None  # of the calling thread, until a call among others returns
    speedup_over_eager: float | None = None
    speedup_over_compile: float | None = None
    speedup_over_best_peer: float | None = None
    best_peer: str | None = None
    extra_memory_bytes: int | None = None  # of the GPU, that a call takes beyond its arguments
    note: str = ""
    machine: Machine

    @property
    def red(self) -> bool:
        """Whether the implementation is wrong, so that it has no figure."""
        return self.verdict.startswith("RED")

    @property
    def group(self) -> tuple[str, str, str]:
        """What rows must share to be compared."""
        return self.operator, self.shape, self.dtype

    @property
    def gbps(self) -> float | None:
        """Rate in GB/s."""
        return None if self.median_ms is None else self.bytes / self.median_ms / 1e6

    @property
    def percent_of_roof(self) -> float | None:
        """Of the roof measured in the same run."""
        return _percent(self.gbps, self.roof_gbps)

    @property
    def percent_of_datasheet(self) -> float | None:
        """Of what the maker promises."""
        return _percent(self.gbps, self.datasheet_gbps)

    def flat(self) -> dict[str, str | int | float | None]:
        """All fields and what follows from them, the machine's among them, for JSON."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "machine"}
        rates = {name: getattr(self, name) for name in ("gbps", "percent_of_roof", "percent_of_datasheet")}
        return {**own, **rates, **self.machine.to_dict()}


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """The rows, each of ours with what it gains over the other implementations of its group."""
    return [_with_speedups(row, [peer for peer in rows if peer.group == row.group]) for row in rows]


def _with_speedups(row: Row, group: Sequence[Row]) -> Row:
    if row.implementation != OURS or row.median_ms is None:
        return row
    peers = {peer.implementation: peer for peer in group if peer.median_ms is not None and peer is not row}

    def over(peer: Row | None) -> float | None:
        return None if peer is None or peer.median_ms is None else peer.median_ms / (row.median_ms or 1.0)

    best = min(peers.values(), key=lambda peer: peer.median_ms or 0.0, default=None)
    return replace(
        row,
        speedup_over_eager=over(peers.get(EAGER)),
        speedup_over_compile=over(peers.get(COMPILED)),
        speedup_over_best_peer=over(best),
        best_peer=None if best is None else f"{best.implementation} {best.version}".strip(),
    )


def _percent(value: float | None, whole: float | None) -> float | None:
    return None if value is None or not whole else 100 * value / whole
