"""The machines that `protrain plan` plans for: this one or one from a profile, with several GPUs, on several nodes.

Only this one needs torch, which finds its device.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from protrain.common.progress import print_line
from protrain.common.tables import format_bytes, parse_memory
from protrain.hardware.memory import for_training, ram_for
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import MORE_RAM_BYTES, MOST_GPUS, next_card, of_machine, shipped_name, shipped_names
from protrain.planning import Answer


def machine_of(args: argparse.Namespace) -> HardwareProfile:
    """The profile of one of the GPUs that ``args`` ask for.

    Raises:
        ValueError: The machine is not known, or it is this one, which has no GPU.
    """
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
    if len({machine.device_type for machine in found.values()}) > 1:
        raise ValueError("--compare takes machines with GPUs or machines without, not both: the model is profiled once")
    return found


def other_machines(
    args: argparse.Namespace, hardware: HardwareProfile, answer: Answer
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The machine of ``args`` with more memory, with the next card, and with twice the GPUs.

    Where nothing fits, the memory and the card have what is lacking. Each has a name, "" if its options say enough, and
    the options that differ. Another card does not change a limit that is given.
    """
    on_host = answer.lacks == "host memory"
    ram_bytes = ram_for(hardware.host_bytes * args.gpus, args.gpus)
    needed_bytes = ram_for((hardware.host_bytes + answer.lacks_bytes * on_host) * args.gpus, args.gpus)
    more_bytes = max(1, math.ceil((needed_bytes - ram_bytes) / MORE_RAM_BYTES)) * MORE_RAM_BYTES
    yield f"{format_bytes(more_bytes)} more RAM", {"host_memory": _in_gib(ram_bytes + more_bytes)}
    card = next_card(hardware.name, 0 if on_host or answer.fits else hardware.device_bytes + answer.lacks_bytes)
    if card is not None and args.device_memory is None:
        yield "", {"hardware": card} | ({"host_memory": _in_gib(ram_bytes)} if args.host_memory is None else {})
    if hardware.device_type == "cuda" and 2 * args.gpus <= MOST_GPUS:
        yield f"{2 * args.gpus} GPUs", {"gpus": 2 * args.gpus}


def _in_gib(size: int) -> str:
    return f"{round(size / 1024**3)}GiB"


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
