"""This machine: sizes from the system, and rates from calibration, from the shipped profile of its GPU, or assumed."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from protrain.common.tables import format_bytes, parse_memory
from protrain.distributed.devices import own_device
from protrain.hardware.cache import cached, device_name
from protrain.hardware.memory import HOST_SHARE, available_host_bytes, usable_cores
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import of_gpu

_DEVICE_RESERVE_BYTES = 384 * 1024**2  # for kernels that are loaded later and for allocations of libraries


def detect(
    device: torch.device | str, *, device_memory: int | str | None = None, host_memory: int | str | None = None
) -> HardwareProfile:
    """The profile of ``device`` and its host, without measuring. Where the user has calibrated, its rates are measured.

    Args:
        device: "cuda", "cuda:1" or "cpu". On a CPU the device is simulated: one half of the available memory plays the
            device's memory, the other half the host's.
        device_memory: bytes or "24GiB" in place of what is free on the device.
        host_memory: bytes or "24GiB" in place of what is available on the host.

    Raises:
        ValueError: there is no such device, or a size cannot be read or is more than the GPU has.
    """
    target = own_device(device)
    assumed = assume(target)
    measured = cached(target)
    base, host_bytes, device_bytes = measured or assumed, assumed.host_bytes, assumed.device_bytes
    if device_memory is not None:
        device_bytes = parse_memory(device_memory, name="device_memory")
        total = torch.cuda.get_device_properties(target).total_memory if target.type == "cuda" else device_bytes
        if device_bytes > total:
            raise ValueError(
                f"device_memory={device_memory!r} is more than the {format_bytes(total)} that {base.name} has; "
                "leave it out to use what is free"
            )
    if host_memory is not None:
        host_bytes = parse_memory(host_memory, name="host_memory")
    return replace(base, device_bytes=device_bytes, host_bytes=host_bytes)


def assume(device: torch.device) -> HardwareProfile:
    """The profile of ``device``, a GPU or the CPU, and its host without measured rates."""
    available = available_host_bytes()
    if device.type != "cuda":
        return _cpu(available // 2)
    gpu = replace(_gpu(device), host_bytes=int(available * HOST_SHARE), cpu_threads=usable_cores())
    if torch.cuda.get_device_properties(device).is_integrated:  # its memory is the host's, which would count twice
        return replace(gpu, device_bytes=min(gpu.device_bytes, gpu.host_bytes // 2), host_bytes=gpu.host_bytes // 2)
    return gpu


def _gpu(device: torch.device) -> HardwareProfile:
    usable = torch.cuda.mem_get_info(device)[0] - _DEVICE_RESERVE_BYTES
    usable += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # the allocator reuses it
    name = torch.cuda.get_device_name(device)
    shipped = of_gpu(name)
    if shipped is not None:
        # These are the rates of another machine with this card. What connects the GPUs here may be slower, and ranks
        # that train together measure it.
        return replace(
            shipped,
            name=name,
            device_bytes=max(1, usable),
            source="detected",
            all_gather_gbps=None,
            all_to_all_gbps=None,
            contention=tuple(group for group in shipped.contention if "collective" not in group.activities),
            network_gbps=None,
        )
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    # A multiprocessor of Ampere to Hopper does 1 to 5 dense bf16 TFLOP/s. The link is taken for PCIe 4 x16.
    return HardwareProfile(
        name=name,
        device_type="cuda",
        device_bytes=max(1, usable),
        host_bytes=0,
        cpu_threads=usable_cores(),
        matmul_tflops=1.5 * processors,
        device_copy_gbps=12.0 * processors,
        h2d_gbps=22.0,
        d2h_gbps=22.0,
        bidirectional_gbps=36.0,
        host_dram_gbps=80.0,
        host_adam_gparams=min(3.0, 0.3 * usable_cores()),
        device_adam_gparams=0.4 * processors,
        source="detected",
    )


def _cpu(device_bytes: int) -> HardwareProfile:
    cores = usable_cores()
    dram = min(80.0, 10.0 * cores)
    return HardwareProfile(
        name=device_name(torch.device("cpu")),
        device_type="cpu",
        device_bytes=device_bytes,
        host_bytes=device_bytes,
        cpu_threads=cores,
        matmul_tflops=0.05 * cores,
        device_copy_gbps=dram,
        h2d_gbps=dram / 2,  # a copy reads and writes
        d2h_gbps=dram / 2,
        bidirectional_gbps=dram / 2,
        host_dram_gbps=dram,
        host_adam_gparams=min(3.0, 0.3 * cores),
        device_adam_gparams=min(3.0, 0.3 * cores),
        source="detected",
    )


def use_expandable_segments() -> None:
    """Let the allocator grow segments in place instead of caching blocks of fixed sizes.

    A plan that fills the card leaves no room for cached blocks of sizes that no longer fit. With fixed segments they
    took 2 GiB in a step that used 75 GiB. A setting that the user made in the environment is kept.
    """
    if not any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
