"""HardwareProfile: what a machine can do, as measured or as read from a file."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from protrain.common.records import Record


@dataclass(frozen=True, kw_only=True)
class Contention(Record):
    """The share of its own rate that each of two activities keeps while both run: 0.5 is half as fast as alone.

    Activities are "h2d" and "d2h" (copies in large pieces), "host_adam", "matmul", "streamed_adam" (the device on
    states in host memory) and "collective" (what ranks gather and exchange in turn).
    """

    activities: tuple[str, ...]
    shares: tuple[float, ...]  # in their order

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.activities):
            raise ValueError(f"Contention has {len(self.shares)} shares for {len(self.activities)} activities")
        for share in self.shares:
            if not 0 < share < math.inf:
                raise ValueError(f"Contention.shares must be finite numbers above 0, not {share!r}")


RATE_UNITS = ("_tflops", "_gbps", "_gparams")  # with which the names of rates end
_LEAST = {
    **dict.fromkeys(("device_bytes", "host_bytes"), 0),
    **dict.fromkeys(("cpu_threads", "host_adam_threads", "world_size", "n_nodes"), 1),
}
_HOST_ADAM_RATES = tuple(f"host_adam_{kind}gparams" for kind in ("", "weight_", "narrow_"))
# What NCCL's buffers and kernels take of each GPU, in MiB. Where GPUs copy to each other, it is a straight line through
# 1,778 on two and 2,544 on four H100s (NCCL 2.28, bench/results/h100/NOTES.md). Where all goes through host memory, the
# buffers are there, and what is left is an assumption.
_NCCL_MIB, _NCCL_MIB_A_RANK = 1016, 384
_NCCL_THROUGH_HOST_MIB = 600


@dataclass(frozen=True, kw_only=True)
class HardwareProfile(Record):
    """Ceilings of one device and its host: all that the planner knows of the machine.

    ``source`` says where the figures come from: "measured", "shipped" or "detected" (sizes read from the system, rates
    assumed). On a CPU the device is simulated: ``device_bytes`` is its budget, and the rates are those of host memory.
    In a run of several processes the rates are those of one process while all of them do the same, and in a plan
    ``host_bytes`` are what one of them may take: ``shared_by`` divides the profile of a whole machine.
    """

    file_kind = "a hardware profile"
    file_source = "`protrain calibrate --out FILE` writes one"

    name: str
    device_type: str  # "cuda" or "cpu"
    device_bytes: int  # the device memory that ProTrain may take
    host_bytes: int  # the host memory that ProTrain may take
    cpu_threads: int
    matmul_tflops: float  # dense matrix products in bf16, or fp32 on a CPU
    device_copy_gbps: float  # bytes read and written
    h2d_gbps: float
    d2h_gbps: float
    bidirectional_gbps: float  # both directions at once, added up
    host_dram_gbps: float  # which DMA and the CPU share
    host_adam_gparams: float  # 1e9 parameters a second
    device_adam_gparams: float
    source: str
    # Only calibration knows the following figures.
    host_adam_threads: int | None = None  # with which the rates of the host's AdamW were measured
    host_adam_weight_gparams: float | None = None  # where an update makes only the new weight
    host_adam_narrow_gparams: float | None = None  # with moments in bf16
    streamed_adam_gparams: float | None = None  # the device on states in host memory
    all_gather_gbps: float | None = None  # bytes that one of several processes receives
    all_to_all_gbps: float | None = None  # bytes that one of them sends in the exchange of a reduction
    network_gbps: float | None = None  # what all GPUs of a machine together receive from other machines; never measured
    contention: tuple[Contention, ...] = ()
    warnings: tuple[str, ...] = ()  # what looks wrong with the machine
    composed: tuple[str, ...] = ()  # rates among these that come from datasheets or from another machine
    # What the profile was measured with. Empty where it was not measured.
    driver: str = ""
    torch_version: str = ""
    processor: str = ""
    world_size: int = 1  # processes that measured together, and in a plan the ranks that train together
    n_nodes: int = 1  # machines that these processes were on
    nccl_p2p: str = ""  # what the environment told NCCL of copies between GPUs, such as NCCL_P2P_DISABLE=1
    method: int = 1  # the way of measuring: see protrain.hardware.cache

    def __post_init__(self) -> None:
        """Refuse impossible figures: every time in a plan is bytes or operations over one of them."""
        if self.device_type not in ("cuda", "cpu"):
            raise ValueError(f"HardwareProfile.device_type must be cuda or cpu, not {self.device_type!r}")
        for field in fields(self):
            rate, optional = getattr(self, field.name), field.default is None
            if field.name.endswith(RATE_UNITS) and not (rate is None and optional) and not 0 < rate < math.inf:
                raise _impossible(field.name, f"a finite number above 0{', or null' * optional}", rate)
        for name, least in _LEAST.items():
            count = getattr(self, name)
            if count is not None and count < least:
                raise _impossible(name, f"at least {least}", count)

    @property
    def gather_gbps(self) -> float:
        """The rate at which ranks gather a tensor: all its bytes over the time. Each rank has a shard of it already.

        If it was not measured, a rank is taken to receive the other shards at the rate of its link from host memory.
        That is right for cards without a link of their own, and too slow for those with NVLink.
        """
        return self._whole_gbps(self.all_gather_gbps, self.h2d_gbps)

    @property
    def reduce_gbps(self) -> float:
        """The rate at which ranks reduce a tensor, each to a shard of the sum: all its bytes over the time.

        If it was not measured, a rank is taken to send the other shards at the rate of its link to host memory.
        """
        return self._whole_gbps(self.all_to_all_gbps, self.d2h_gbps)

    def _whole_gbps(self, measured_gbps: float | None, link_gbps: float) -> float:
        """The rate that counts all bytes, from one that counts those that a rank receives or sends."""
        if self.world_size == 1:
            return math.inf  # one rank has all there is
        return (measured_gbps or link_gbps) * self.world_size / (self.world_size - 1)

    def known(self, rate: str) -> str:
        """How the field ``rate`` is known: "measured", "composed", or "assumed" where it has no value of its own."""
        if getattr(self, rate) is None:
            return "assumed"
        return "composed" if rate in self.composed else "measured"

    @property
    def rates(self) -> str:
        """How most rates are known: "measured", "composed" or "assumed". ``known`` says it of one rate."""
        return "assumed" if self.source == "detected" else self.known("matmul_tflops")

    def shared_by(self, n_ranks: int, n_nodes: int = 1) -> Self:
        """The profile of one of ``n_ranks`` that train together on this machine, each with a GPU of its own.

        Host memory, cores, and what the host's DRAM limits are divided among them, as one DRAM serves all GPUs of a
        machine. Rates of which each of several measuring processes already had a share are not divided again. A GPU's
        link is its own, but carries no more than its share of the DRAM.

        With ``n_nodes`` as many equal machines train together, with ``n_ranks`` on each. The GPUs of a machine share
        its network, and if that is slower than what connects them, it sets the rate of collectives.
        """
        share = self.world_size / self.n_nodes / n_ranks
        dram_gbps = self.host_dram_gbps * share
        # What several machines have measured has the network in it already.
        network = {} if n_nodes == 1 or self.n_nodes > 1 else self._over_network(n_ranks, n_nodes)
        return replace(
            self,
            world_size=n_ranks * n_nodes,
            n_nodes=n_nodes,
            host_bytes=self.host_bytes // n_ranks,
            cpu_threads=max(1, self.cpu_threads // n_ranks),
            h2d_gbps=min(self.h2d_gbps, dram_gbps),
            d2h_gbps=min(self.d2h_gbps, dram_gbps),
            bidirectional_gbps=min(self.bidirectional_gbps, dram_gbps),
            host_dram_gbps=dram_gbps,
            **self.host_adam_scaled(share),
            **network,
        )

    def host_adam_scaled(self, factor: float) -> dict[str, Any]:
        """The rates of the host's AdamW that are known, by field, on a host that is faster by ``factor``."""
        rates = {name: getattr(self, name) for name in _HOST_ADAM_RATES}
        return {name: factor * rate for name, rate in rates.items() if rate is not None}

    @property
    def collective_bytes(self) -> int:
        """The memory of each GPU that NCCL takes for the communicators of a training, beside torch's allocator."""
        if self.world_size == 1 or self.device_type == "cpu":
            return 0
        through_host = self.all_gather_gbps is not None and self.all_gather_gbps < self.h2d_gbps
        between = _NCCL_MIB + _NCCL_MIB_A_RANK * self.world_size // self.n_nodes
        return (_NCCL_THROUGH_HOST_MIB if through_host else between) * 1024**2

    @property
    def knows_contention(self) -> bool:
        """Whether it was measured how copies, the host and computing slow each other down, not just collectives."""
        return any("collective" not in group.activities for group in self.contention)

    def _over_network(self, n_ranks: int, n_nodes: int) -> dict[str, Any]:
        """The rates of collectives that the network slows down, with ``n_ranks`` on each of ``n_nodes`` machines.

        In a gather what the GPUs of a machine lack enters it once, as NCCL passes it on in rings through all GPUs. In
        an exchange each GPU sends other values to every other one, and those for other machines share the network.
        """
        if self.network_gbps is None:
            raise ValueError(f"HardwareProfile.network_gbps of {self.name} must be known for several machines")
        others = n_ranks * n_nodes - 1
        sent_away = n_ranks * (n_nodes - 1) / others  # the share of what a rank sends that leaves the machine
        over_network = {
            "all_gather_gbps": self.network_gbps,
            "all_to_all_gbps": self.network_gbps / n_ranks / sent_away,
        }
        inside = {
            "all_gather_gbps": self.all_gather_gbps or self.h2d_gbps,
            "all_to_all_gbps": self.all_to_all_gbps or self.d2h_gbps,
        }
        slowed: dict[str, Any] = {name: gbps for name, gbps in over_network.items() if gbps < inside[name]}
        return slowed | {"composed": tuple(dict.fromkeys((*self.composed, *slowed)))}

    def share(self, activity: str, other: str) -> float:
        """The share of its rate that ``activity`` keeps while the ``other`` one runs too: 1 where nothing is known."""
        for pair in self.contention:
            if set(pair.activities) == {activity, other}:
                return pair.shares[pair.activities.index(activity)]
        return 1.0

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the printed table: the known values that the planner reads."""
        return [
            (name, value)
            for name, value in super().rows()
            if name not in ("contention", "warnings", "method") and value not in ("-", "")
        ]


def _impossible(name: str, needed: str, value: float) -> ValueError:
    return ValueError(f"HardwareProfile.{name} must be {needed}, not {value!r}")
