"""HardwareProfile: what a machine can do, measured or read from a shipped file."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from protrain.common.records import Record


@dataclass(frozen=True, kw_only=True)
class Figure(Record):
    """One measured rate, with its spread."""

    name: str  # "h2d"
    at: str  # what tells it from others of its name: size, threads or way; may be empty
    unit: str  # "GB/s", "TFLOP/s", "G param/s"
    median: float
    p20: float
    p80: float
    datasheet: float | None  # what the maker promises; None where that isn't known
    mean: float | None = None  # all samples' work over their time; None in older files

    @property
    def title(self) -> str:
        """Name and place."""
        return f"{self.name}, {self.at}" if self.at else self.name

    @property
    def long_run(self) -> float:
        """The rate of many in a row, to which each adds its time."""
        return self.median if self.mean is None else self.mean


@dataclass(frozen=True, kw_only=True)
class Contention(Record):
    """What is left of the rate of each activity while all of them run: 1 is all, 0.5 half as fast as alone.

    Activities are "h2d" and "d2h" (copies in large pieces), "host_adam", "matmul" and "streamed_adam" (the GPU on
    states in host memory).
    """

    activities: tuple[str, ...]
    shares: tuple[float, ...]  # in their order

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.activities):
            raise ValueError(f"Contention has {len(self.shares)} shares for {len(self.activities)} activities")
        for share in self.shares:
            if not 0 < share < math.inf:
                raise ValueError(f"Contention.shares must be finite numbers above 0, not {share!r}")


_RATES = (
    *("matmul_tflops", "device_copy_gbps", "h2d_gbps", "d2h_gbps", "bidirectional_gbps", "host_dram_gbps"),
    *("host_adam_gparams", "device_adam_gparams"),
)
_MEASURED_RATES = (
    *("host_adam_weight_gparams", "host_adam_narrow_gparams", "host_adam_p20_gparams", "streamed_adam_gparams"),
    *("flatten_gbps", "pack_gbps", "all_gather_gbps", "reduce_scatter_gbps"),
)
_MOST_BYTES = 2**63  # the planner computes with 64-bit integers
_RETIRED = {"streamed_adam_copies", "pinning_gbps"}  # fields of older files that nothing reads any more


@dataclass(frozen=True, kw_only=True)
class HardwareProfile(Record):
    """Ceilings of one device and its host; the planner's only knowledge of the machine.

    ``source`` says where the figures come from: "measured", "shipped" or "detected" (sizes read from the
    system, rates assumed). On a CPU the device is simulated: ``device_bytes`` is the budget, and the rates are
    those of host memory. In a run of several processes rates are of one of them while all do the same.
    """

    file_kind = "a hardware profile"
    file_source = "`protrain calibrate --out FILE` writes one"

    name: str
    device_type: str  # "cuda" or "cpu"
    device_bytes: int  # usable device memory: what ProTrain may take
    host_bytes: int  # usable host memory: what ProTrain may take
    cpu_threads: int
    matmul_tflops: float  # bf16 (fp32 on a CPU) matmul, dense
    device_copy_gbps: float  # bytes read + written
    h2d_gbps: float
    d2h_gbps: float
    bidirectional_gbps: float  # both directions at once, in all
    host_dram_gbps: float  # shared by DMA and the CPU
    host_adam_gparams: float  # 1e9 parameters a second, all threads
    device_adam_gparams: float
    source: str
    # What only calibration knows.
    host_adam_threads: int | None = None  # the fewest that reach host_adam_gparams
    host_adam_weight_gparams: float | None = None  # of updates that make the new weight alone
    host_adam_narrow_gparams: float | None = None  # with moments in bf16
    host_adam_p20_gparams: float | None = None  # what host_adam_gparams is at least, four fifths of the time
    streamed_adam_gparams: float | None = None  # the device on states in host memory
    flatten_gbps: float | None = None  # bytes read + written
    pack_gbps: float | None = None  # bytes read + written
    all_gather_gbps: float | None = None  # received by one of several processes
    reduce_scatter_gbps: float | None = None
    contention: tuple[Contention, ...] = ()
    figures: tuple[Figure, ...] = ()  # everything measured, by size and by threads
    warnings: tuple[str, ...] = ()  # what looks wrong with the machine
    # What it was measured with; empty where it wasn't.
    driver: str = ""
    torch_version: str = ""
    processor: str = ""
    world_size: int = 1
    method: int = 1  # of measuring; see protrain.hardware.cache

    def __post_init__(self) -> None:
        """Times are bytes and operations over these figures: an impossible one would make nonsense of every plan."""
        if self.device_type not in ("cuda", "cpu"):
            raise ValueError(f"HardwareProfile.device_type must be cuda or cpu, not {self.device_type!r}")
        for name in _RATES:
            if not 0 < getattr(self, name) < math.inf:
                raise _impossible(name, "a finite number above 0", getattr(self, name))
        for name in _MEASURED_RATES:
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise _impossible(name, "a finite number above 0, or null", rate)
        for name in ("cpu_threads", "world_size"):
            if getattr(self, name) < 1:
                raise _impossible(name, "at least 1", getattr(self, name))
        if self.host_adam_threads is not None and self.host_adam_threads < 1:
            raise _impossible("host_adam_threads", "at least 1, or null", self.host_adam_threads)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The profile in ``data``. ValueError also where its machine has no memory: only a search asks about that."""
        if isinstance(data, dict):
            data = {name: value for name, value in data.items() if name not in _RETIRED}
        profile = super().from_dict(data)
        for name in ("device_bytes", "host_bytes"):
            if not 0 < getattr(profile, name) < _MOST_BYTES:
                raise _impossible(name, "above 0 and less than 2**63", getattr(profile, name))
        return profile

    def share(self, activity: str, beside: Collection[str]) -> float:
        """What is left of the rate of ``activity`` while those ``beside`` it run as well: 1 where nothing is known.

        Of measured groups without others the one that leaves least counts: more company makes nothing faster.
        """
        present = {activity, *beside}
        shares = [
            group.shares[group.activities.index(activity)]
            for group in self.contention
            if activity in group.activities and present.issuperset(group.activities)
        ]
        return min(shares, default=1.0)

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the printed table: what the planner reads, known values alone."""
        return [
            (name, value)
            for name, value in super().rows()
            if name not in ("contention", "figures", "warnings", "method") and value not in ("-", "")
        ]


def _impossible(name: str, needed: str, value: float) -> ValueError:
    return ValueError(f"HardwareProfile.{name} must be {needed}, not {value!r}")
