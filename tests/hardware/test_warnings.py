"""What calibration warns about: the link, clocks, threads, and memory that cannot be pinned."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
import torch

from protrain.hardware.calibration.activities import pinned
from protrain.hardware.calibration.report import (
    clock_warnings,
    link_warnings,
    machine_warnings,
    pinning_warnings,
)
from protrain.hardware.calibration.timing import Effort
from protrain.hardware.nvml import GpuFacts, gpu_facts

CARD = torch.device("cuda", 0)
UUID = "0b1c"


class FakeError(Exception):
    pass


def _refuse(*arguments: object) -> int:
    raise FakeError("not supported")


def _fake(**answers: Callable[..., object]) -> types.ModuleType:
    """A management library with one healthy card on a PCI Express 5 x16 link, but for ``answers``."""
    module = types.ModuleType("pynvml")

    def handle(identifier: str) -> str:
        if identifier != f"GPU-{UUID}":
            raise FakeError("no such card")
        return "handle"

    known: dict[str, Callable[..., object]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda card: 5,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda card: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda card: 16,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda card: 16,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: 0x04,  # the power limit, as under any full load
    }
    vars(module).update({**known, **answers, "NVMLError": FakeError})
    return module


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuFacts | None]:
    """Facts of the fake card, with other answers."""

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=UUID))

    def facts(**answers: Callable[..., object]) -> GpuFacts | None:
        monkeypatch.setitem(sys.modules, "pynvml", _fake(**answers))
        return gpu_facts(CARD)

    return facts


def test_a_healthy_card_raises_no_warning(library: Callable[..., GpuFacts]) -> None:
    facts = library()
    assert facts == GpuFacts(
        driver="580.1",
        pcie_generation=5,
        pcie_width=16,
        pcie_generation_max=5,
        pcie_width_max=16,
        throttled=False,
    )
    assert link_warnings(facts) == clock_warnings(facts) == []


def test_a_narrow_or_slow_link_is_told(library: Callable[..., GpuFacts]) -> None:
    narrow = link_warnings(library(nvmlDeviceGetCurrPcieLinkWidth=lambda card: 8))
    assert len(narrow) == 1
    assert "runs at width x8 while it copies, and card and slot allow x16: check slot" in narrow[0]
    slow = link_warnings(
        library(nvmlDeviceGetCurrPcieLinkGeneration=lambda card: 3, nvmlDeviceGetCurrPcieLinkWidth=lambda card: 4)
    )
    assert len(slow) == 2
    assert "runs at generation 3" in slow[0]


def test_what_a_virtual_machine_hides_raises_no_warning(library: Callable[..., GpuFacts]) -> None:
    facts = library(
        nvmlDeviceGetCurrPcieLinkWidth=_refuse,
        nvmlDeviceGetMaxPcieLinkGeneration=_refuse,
        nvmlDeviceGetCurrentClocksThrottleReasons=_refuse,
    )
    assert facts.pcie_width is facts.pcie_generation_max is None
    assert link_warnings(facts) == clock_warnings(facts) == []


def test_without_the_library_its_driver_or_the_card_nothing_is_known(
    library: Callable[..., GpuFacts | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library(nvmlInit=_refuse) is None
    assert library(nvmlDeviceGetHandleByUUID=_refuse) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_facts(CARD) is None
    assert gpu_facts(torch.device("cpu")) is None
    assert link_warnings(None) == clock_warnings(None) == []


def test_a_slice_of_a_card_is_found_and_hides_its_link(library: Callable[..., GpuFacts]) -> None:
    def handle(identifier: str) -> str:
        if identifier != f"MIG-{UUID}":
            raise FakeError("no such card")
        return "slice"

    facts = library(nvmlDeviceGetHandleByUUID=handle, nvmlDeviceGetCurrPcieLinkWidth=_refuse)
    assert (facts.driver, facts.pcie_width) == ("580.1", None)


def test_an_old_library_of_the_same_name_costs_nothing_else(library: Callable[..., GpuFacts | None]) -> None:
    def take_bytes_alone(identifier: object) -> str:
        raise TypeError("bytes or integer address expected instead of str instance")

    def fail_to_load() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    assert library(nvmlDeviceGetHandleByUUID=take_bytes_alone) is None
    assert library(nvmlInit=fail_to_load) is None


def test_a_card_that_slows_itself_down_is_told(library: Callable[..., GpuFacts]) -> None:
    for fault in (0x08, 0x20, 0x40, 0x80):
        (line,) = clock_warnings(library(nvmlDeviceGetCurrentClocksThrottleReasons=lambda card, fault=fault: fault))
        assert "slows itself down, by heat" in line


def _of_machine(*, seconds: float = 30.0, names: tuple[str, ...] = ("H100",), torch_threads: int = 4) -> list[str]:
    effort = Effort(seconds=seconds, host_room_bytes=64 * 1024**3, device_room_bytes=64 * 1024**3)
    return machine_warnings(effort, names, torch_threads=torch_threads, cores=4)


def test_what_slows_a_machine_down_before_it_is_measured_is_told() -> None:
    assert _of_machine(names=("H100", "H100")) == []
    (line,) = _of_machine(torch_threads=1)
    assert "torch uses 1 of the 4 cores of this process: unset OMP_NUM_THREADS" in line
    (line,) = _of_machine(names=("H100", "A100", "H100"))
    assert "ranks have unlike GPUs: H100 and A100" in line
    (line,) = _of_machine(seconds=3.0)
    assert "so little time that tensors of 102 MiB were measured" in line


def test_memory_that_cannot_be_pinned_is_told() -> None:
    assert pinning_warnings(pinned=True) == []
    (line,) = pinning_warnings(pinned=False)
    assert "raise the limit of locked memory (ulimit -l" in line


def test_memory_is_given_back_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(8) for _ in range(3)]
    refused = tensors[1].data_ptr()
    given_back: list[int] = []
    driver = types.SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: 1 if address == refused else 0,
        cudaHostUnregister=given_back.append,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "ones", lambda *size, device: None)  # the launch that clears the driver's error
    with pinned(*tensors, device=torch.device("cuda", 0)) as accepted:
        assert not accepted
        assert given_back == []
    assert given_back == [tensors[0].data_ptr()]
    with pinned(tensors[2], device=torch.device("cuda", 0)) as accepted:
        assert accepted
