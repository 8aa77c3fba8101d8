"""The ceilings that rows are set against, each measured once in the run that needs it."""

from __future__ import annotations

from statistics import median

import torch

from protrain.hardware.calibration.activities import CPU, Activity, Transfers, copying, pinned
from protrain.hardware.calibration.contention import rates_together
from protrain.hardware.nvml import gpu_facts
from protrain.hardware.shipped import of_card

DEVICE, PCIE, PCIE_BOTH, DRAM = "device copy", "PCIe one way", "PCIe both ways at once", "host DRAM"
PRODUCTS = "its matrix products"  # timed in turns with each row, as their rate depends on their sizes
_BYTES = 1024**3
_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one direction, after line coding


class Roofs:
    """Measured and promised rates of the machine, GB/s."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: dict[str, float] = {}

    def measured_gbps(self, roof: str) -> float:
        """What the machine reaches now."""
        if roof not in self._measured:
            self._measured |= self._measure(roof)
        return self._measured[roof]

    def _measure(self, roof: str) -> dict[str, float]:
        """As calibration measures it, with copies over the link of 256 MiB."""
        if roof in (DEVICE, DRAM):
            memory = self._device if roof == DEVICE else CPU
            return {roof: _alone(copying(memory, _BYTES), duration_s=1.0)}
        transfers = Transfers(self._device, _BYTES // 4)
        with pinned(*transfers.host, device=self._device):
            copies = transfers.activities()
            one_way_gbps = [_alone(copy, duration_s=0.5) for copy in copies.values()]
            both_gbps = rates_together(copies, duration_s=0.5)
        return {PCIE: min(one_way_gbps), PCIE_BOTH: sum(map(median, both_gbps.values()))}

    def datasheet_gbps(self, roof: str) -> float | None:
        """What its maker promises; None where that isn't known."""
        if roof == DEVICE:
            sheet = of_card(torch.cuda.get_device_name(self._device))
            return None if sheet is None else sheet.memory_gbps
        if roof in (PCIE, PCIE_BOTH):
            facts = gpu_facts(self._device)
            one_way = None if facts is None else pcie_gbps(facts.pcie_generation_max, facts.pcie_width_max)
            return None if one_way is None else one_way * (2 if roof == PCIE_BOTH else 1)
        return None


def _alone(activity: Activity, *, duration_s: float) -> float:
    return median(rates_together({"it": activity}, duration_s=duration_s)["it"])


def pcie_gbps(generation: int | None, width: int | None) -> float | None:
    """What a PCI Express link carries one way, or None where generation or width is unknown."""
    lane = None if generation is None else _LANE_GBPS.get(generation)
    return None if lane is None or width is None else lane * width
