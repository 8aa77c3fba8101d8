"""The ceilings that rows are set against, each measured once in the run that needs it."""

from __future__ import annotations

import torch

from bench.kernels.timing import ColdCache, median_seconds
from protrain.hardware.calibration.rates import dram_gbps
from protrain.hardware.datasheet import of_card
from protrain.hardware.nvml import gpu_facts

DEVICE, PCIE, PCIE_BOTH, DRAM = "device copy", "PCIe one way", "PCIe both ways at once", "host DRAM"
NO_ROOF = "nothing to move"
PRODUCTS = "its matrix products"  # timed in turns with each row, as their rate depends on their sizes
_BYTES = 1024**3
_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one direction, after line coding


class Roofs:
    """Measured and promised rates of the machine, GB/s."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: dict[str, float] = {}

    def measured_gbps(self, roof: str) -> float | None:
        """What the machine reaches now; None where nothing is moved."""
        if roof == NO_ROOF:
            return None
        if roof not in self._measured:
            measures = {
                **{DEVICE: self._copy_gbps, DRAM: self._dram_gbps},
                **{PCIE: self._link_gbps, PCIE_BOTH: self._link_both_gbps},
            }
            self._measured[roof] = measures[roof]()
        return self._measured[roof]

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

    def _copy_gbps(self) -> float:
        source = torch.zeros(_BYTES // 4, device=self._device)
        target = torch.empty_like(source)
        cold = ColdCache(self._device)
        by_copy = median_seconds(lambda: target.copy_(source), setup=cold)
        by_kernel = median_seconds(lambda: torch.mul(source, 1.0, out=target), setup=cold)
        return 2 * _BYTES / min(by_copy, by_kernel) / 1e9

    def _link_gbps(self) -> float:
        host = torch.zeros(_BYTES // 4, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(host, device=self._device)
        up = median_seconds(lambda: target.copy_(host, non_blocking=True), setup=None)
        down = median_seconds(lambda: host.copy_(target, non_blocking=True), setup=None)
        return host.nbytes / max(up, down) / 1e9

    def _link_both_gbps(self) -> float:
        up, down = (torch.zeros(_BYTES // 4, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        received, sent = (torch.zeros_like(up, device=self._device) for _ in range(2))
        other = torch.cuda.Stream(self._device)

        def copy() -> None:
            other.wait_stream(torch.cuda.current_stream(self._device))
            received.copy_(up, non_blocking=True)
            with torch.cuda.stream(other):
                down.copy_(sent, non_blocking=True)
            torch.cuda.current_stream(self._device).wait_stream(other)

        return (up.nbytes + down.nbytes) / median_seconds(copy, setup=None) / 1e9

    def _dram_gbps(self) -> float:
        return dram_gbps(_BYTES, budget_s=2.0)


def pcie_gbps(generation: int | None, width: int | None) -> float | None:
    """What a PCI Express link carries one way, or None where generation or width is unknown."""
    lane = None if generation is None else _LANE_GBPS.get(generation)
    return None if lane is None or width is None else lane * width
