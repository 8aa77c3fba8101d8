"""HardwareProfile: what a machine can do, measured or read from a shipped file."""

from __future__ import annotations

from dataclasses import dataclass

from protrain.records import Record


@dataclass(frozen=True, kw_only=True)
class HardwareProfile(Record):
    """Ceilings of one device and its host; the planner's only knowledge of the machine.

    ``source`` says where the figures come from: "measured", "shipped" or "detected" (sizes read from the
    system, rates assumed). On a CPU the device is simulated: ``device_bytes`` is the budget, and the rates are
    those of host memory.
    """

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
