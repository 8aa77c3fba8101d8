"""The machines that `protrain plan` plans for: this one or one from a profile, with several GPUs, on several nodes.

Only this one needs torch, which finds its device.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from protrain.common.progress import print_line
from protrain.common.tables import parse_memory
from protrain.hardware.memory import for_training
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import of_machine, shipped_name, shipped_names


def machine_of(args: argparse.Namespace) -> HardwareProfile:
    """The profile of one of the GPUs that ``args`` ask for.

    Raises:
        ValueError: The machine is not known, or it is this one, which has no GPU, or a network is given for one node.
    """
    _refuse_unused_network(args, args.nodes)
    if args.hardware is not None:
        return _elsewhere(args, args.hardware, args.gpus, args.nodes)
    return _shared(args, _this_machine(args), args.gpus, args.nodes)


def _this_machine(args: argparse.Namespace) -> HardwareProfile:
    """This machine, with the device and the memory that ``args`` say.

    Raises:
        ValueError: It has no GPU. To run a large model on a CPU for its profile takes hours, which only --device cpu
            asks for.
    """
    import torch

    from protrain.distributed.devices import own_device
    from protrain.hardware.cache import why_not_cached
    from protrain.hardware.detection import detect

    if args.device is None and not torch.cuda.is_available():
        raise ValueError(
            "this machine has no GPU to plan for: name another with --hardware, for example --hardware rtx4090, or "
            "give --device cpu for a simulated device"
        )
    device = own_device(args.device or "cuda")
    ram_bytes = _ram_bytes(args)
    host_bytes = None if ram_bytes is None else for_training(ram_bytes, args.gpus)
    found = detect(device, device_memory=args.device_memory, host_memory=host_bytes)
    why = why_not_cached(device) if found.source != "measured" else None
    if why is not None:
        print_line(f"{why}; `protrain calibrate` measures this machine anew")
    return found


def machines_of(args: argparse.Namespace) -> dict[str, HardwareProfile]:
    """The profile of one of the GPUs of each machine in --compare, by what it is called there."""
    if args.hardware is not None or (args.gpus, args.nodes) != (1, 1):
        raise ValueError("--compare names machines with their GPUs and nodes: leave out --hardware, --gpus and --nodes")
    found = {text.strip(): _elsewhere(args, *_counted(text.strip())) for text in args.compare.split(",")}
    _refuse_unused_network(args, max(machine.n_nodes for machine in found.values()))
    if len({machine.device_type for machine in found.values()}) > 1:
        raise ValueError("--compare takes machines with GPUs or machines without, not both: the model is profiled once")
    return found


def _counted(text: str) -> tuple[str, int, int]:
    """A machine like "a100x8x2", "8xH100" or "RTX 4090" as its name and its numbers of GPUs and of nodes."""
    parts = [part.strip() for part in text.split("x")]
    # An x may be a part of the name, as in rtx4090, so the longest name that is known counts.
    for n_counts in range(3):
        cut = len(parts) - n_counts
        for name, counts in (("x".join(parts[:cut]), parts[cut:]), ("x".join(parts[n_counts:]), parts[:n_counts])):
            if _is_machine(name) and all(re.fullmatch("[1-9][0-9]*", count) for count in counts):
                n_gpus, n_nodes, *_ = [*map(int, counts), 1, 1]
                return name, n_gpus, n_nodes
    raise ValueError(
        f"--compare: {text!r} is no machine: give NAME, NAMExGPUS or NAMExGPUSxNODES, such as a100x8x2, with a JSON "
        f"file or one of {', '.join(shipped_names())} as the name"
    )


def _is_machine(name: str) -> bool:
    return name.endswith(".json") or shipped_name(name) is not None


def _refuse_unused_network(args: argparse.Namespace, n_nodes: int) -> None:
    if args.network_gbps is not None and n_nodes == 1:
        raise ValueError("--network-gbps is of the network between nodes, and there is one node: give --nodes too")


def _ram_bytes(args: argparse.Namespace) -> int | None:
    return None if args.host_memory is None else parse_memory(args.host_memory, name="host_memory")


def _elsewhere(args: argparse.Namespace, name: str, n_gpus: int, n_nodes: int) -> HardwareProfile:
    if args.device is not None:
        raise ValueError(f"--device names a device of this machine: leave it out, as the plan is for {name}")
    hardware = of_machine(name, n_gpus, ram_bytes=_ram_bytes(args))
    if args.device_memory is not None:
        hardware = replace(hardware, device_bytes=parse_memory(args.device_memory, name="device_memory"))
    return _shared(args, hardware, n_gpus, n_nodes)


def _shared(args: argparse.Namespace, hardware: HardwareProfile, n_gpus: int, n_nodes: int) -> HardwareProfile:
    """One GPU's share of ``hardware``, which is named with its nodes and what is assumed of their network."""
    if n_nodes == 1:
        return hardware.shared_by(n_gpus)
    how = "assumed"
    if args.network_gbps is not None:
        how, hardware = "as given", replace(hardware, network_gbps=args.network_gbps)
    if hardware.network_gbps is None:
        raise ValueError(f"nothing is known of the network between nodes of {hardware.name}: give --network-gbps")
    name = f"{n_nodes} nodes of {hardware.name}, {hardware.network_gbps:g} GB/s of network each ({how})"
    return replace(hardware.shared_by(n_gpus, n_nodes), name=name)
