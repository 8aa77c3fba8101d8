"""Profiles of cards that nobody has measured yet, composed from their datasheets.

A rate is the datasheet's times the share of its own datasheet that an H100 reached when it was measured. The host is
that of a machine as such cards are found in, with the rates of a shipped profile. Nothing has run on these machines: a
calibration replaces such a profile (docs/new-gpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protrain.hardware.datasheet import of_card, pcie_gbps
from protrain.hardware.profile import Contention, HardwareProfile

_NVLINK_GBPS = 450.0  # of an H100, each way
_RATES = (
    *("matmul_tflops", "device_copy_gbps", "h2d_gbps", "d2h_gbps", "bidirectional_gbps", "host_dram_gbps"),
    *("host_adam_gparams", "device_adam_gparams", "all_gather_gbps", "all_to_all_gbps", "network_gbps"),
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card and the machine around it, as datasheets and those who rent them out describe both."""

    name: str  # as the driver says it
    usable_gib: float  # of device memory, without what the driver and a context take
    pcie: int  # generation, of 16 lanes
    peer_gbps: float | None  # between cards, each way; None: through host memory
    host: str  # the shipped profile whose host has the same rates
    host_gib: int  # of which 90% are used
    cores: int
    network_gbps: float  # per machine


# An eighth of a server with eight cards, one card of a cloud's machine, and a desktop computer.
_DGX: dict[str, Any] = {"host": "h100", "host_gib": 256, "cores": 14, "network_gbps": 400.0}
_RENTED: dict[str, Any] = {"host": "h100", "host_gib": 128, "cores": 16}
_DESKTOP: dict[str, Any] = {"host": "rtx3090", "host_gib": 128, "cores": 12, "network_gbps": 1.25}
CARDS: dict[str, Card] = {
    "a10g": Card(name="NVIDIA A10G", usable_gib=21.6, pcie=4, peer_gbps=None, network_gbps=3.1, **_RENTED),
    "b200": Card(name="NVIDIA B200", usable_gib=177, pcie=5, peer_gbps=900, **_DGX),
    "l40s": Card(name="NVIDIA L40S", usable_gib=43.9, pcie=4, peer_gbps=None, network_gbps=12.5, **_RENTED),
    "mi300x": Card(name="AMD Instinct MI300X", usable_gib=190, pcie=5, peer_gbps=448, **_DGX),
    "rtx4090": Card(name="NVIDIA GeForce RTX 4090", usable_gib=22.8, pcie=4, peer_gbps=None, **_DESKTOP),
    "rtx5090": Card(name="NVIDIA GeForce RTX 5090", usable_gib=30.5, pcie=5, peer_gbps=None, **_DESKTOP),
}


def compose(card: Card, h100: HardwareProfile, host: HardwareProfile) -> HardwareProfile:
    """The profile of ``card``, given the measured one of an H100 and the one that has its host."""
    sheet, measured = of_card(card.name), of_card(h100.name)
    link_gbps, measured_link_gbps = pcie_gbps(card.pcie, 16), pcie_gbps(5, 16)
    assert sheet is not None, f"datasheet.py has no {card.name}"
    assert measured is not None, f"datasheet.py has no {h100.name}"
    assert link_gbps is not None, f"datasheet.py has no PCI Express {card.pcie}"
    assert measured_link_gbps is not None, "datasheet.py has no PCI Express 5"
    memory, link = sheet.memory_gbps / measured.memory_gbps, link_gbps / measured_link_gbps
    # What cards without a link of their own exchange passes through host memory, in both directions of their link.
    peer_gbps = card.peer_gbps or h100.bidirectional_gbps * link / 2
    return HardwareProfile(
        name=card.name,
        device_type="cuda",
        device_bytes=int(card.usable_gib * 1024**3),
        host_bytes=int(0.9 * card.host_gib * 1024**3),
        cpu_threads=card.cores,
        matmul_tflops=h100.matmul_tflops * sheet.matmul_tflops / measured.matmul_tflops,
        device_copy_gbps=h100.device_copy_gbps * memory,
        h2d_gbps=h100.h2d_gbps * link,
        d2h_gbps=h100.d2h_gbps * link,
        bidirectional_gbps=h100.bidirectional_gbps * link,
        host_dram_gbps=host.host_dram_gbps,
        host_adam_gparams=host.host_adam_gparams,
        device_adam_gparams=h100.device_adam_gparams * memory,
        all_gather_gbps=(h100.all_gather_gbps or 0) / _NVLINK_GBPS * peer_gbps,
        all_to_all_gbps=(h100.all_to_all_gbps or 0) / _NVLINK_GBPS * peer_gbps,
        network_gbps=card.network_gbps,
        contention=(
            Contention(activities=("collective", "matmul"), shares=(1.0, h100.share("matmul", ["collective"]))),
        ),
        composed=_RATES,
        source="shipped",
    )
