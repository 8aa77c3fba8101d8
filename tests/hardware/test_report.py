"""What people read of a calibration: the printed rates, and warnings of the link, clocks and unpinned memory."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from protrain.hardware.calibration.activities import pinned
from protrain.hardware.calibration.report import card_warnings, machine_warnings, report, warnings_of_all
from protrain.hardware.calibration.timing import Effort
from protrain.hardware.nvml import GpuFacts, gpu_facts
from protrain.hardware.profile import Contention
from protrain.hardware.shipped import load

CARD = torch.device("cuda", 0)
UUID = "0b1c"
Library = Callable[..., GpuFacts | None]


class FakeError(Exception):
    pass


def _refuse(*arguments: object) -> int:
    raise FakeError("not supported")


def _handle(identifier: str, kind: str = "GPU") -> str:
    if identifier != f"{kind}-{UUID}":
        raise FakeError("no such card")
    return "handle"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Facts that a fake library gives of a healthy card on a PCI Express 5 x16 link, but for other answers."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=UUID))

    def facts(**answers: Callable[..., object]) -> GpuFacts | None:
        module = types.ModuleType("pynvml")
        known: dict[str, Callable[..., object]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByUUID": _handle,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda card: 5,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda card: 5,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda card: 16,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda card: 16,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: 0x04,  # the power limit, as under any full load
        }
        vars(module).update({**known, **answers, "NVMLError": FakeError})
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return gpu_facts(CARD)

    return facts


def test_a_healthy_card_or_one_that_a_virtual_machine_hides_raises_no_warning(library: Library) -> None:
    link: dict[str, Any] = {"pcie_generation": 5, "pcie_width": 16, "pcie_generation_max": 5, "pcie_width_max": 16}
    healthy = GpuFacts(driver="580.1", throttled=False, **link)
    hidden = library(
        nvmlDeviceGetHandleByUUID=partial(_handle, kind="MIG"),  # a slice of a card
        nvmlDeviceGetCurrPcieLinkWidth=_refuse,
        nvmlDeviceGetMaxPcieLinkGeneration=_refuse,
        nvmlDeviceGetCurrentClocksThrottleReasons=_refuse,
    )
    assert hidden is not None
    assert hidden.driver == "580.1"
    assert hidden.pcie_width is hidden.pcie_generation_max is None
    assert library() == healthy
    for facts in (healthy, hidden, None):
        assert card_warnings(facts) == []


def test_a_narrow_or_slow_link_and_a_card_that_slows_itself_down_are_told(library: Library) -> None:
    (narrow,) = card_warnings(library(nvmlDeviceGetCurrPcieLinkWidth=lambda card: 8))
    assert "runs at width x8 while it copies, and card and slot allow x16: check slot" in narrow
    slow, _ = card_warnings(
        library(nvmlDeviceGetCurrPcieLinkGeneration=lambda card: 3, nvmlDeviceGetCurrPcieLinkWidth=lambda card: 4)
    )
    assert "runs at generation 3" in slow
    for fault in (0x08, 0x20, 0x40, 0x80):
        (line,) = card_warnings(library(nvmlDeviceGetCurrentClocksThrottleReasons=lambda card, fault=fault: fault))
        assert "slows itself down, by heat" in line


def test_without_the_library_its_driver_or_the_card_nothing_is_known(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor with an old package of the same name, which fails by other errors."""

    def take_bytes_alone(identifier: object) -> str:
        raise TypeError("bytes or integer address expected instead of str instance")

    assert library(nvmlInit=_refuse) is None
    for handle in (_refuse, take_bytes_alone):
        assert library(nvmlDeviceGetHandleByUUID=handle) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_facts(CARD) is gpu_facts(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("seconds", "names", "words"),
    [
        (30.0, ("H100", "H100"), []),
        (30.0, ("H100", "A100", "H100"), ["ranks have unlike GPUs: H100 and A100"]),
        (3.0, ("H100",), ["so little time that tensors of 102 MiB were measured"]),
    ],
)
def test_what_makes_rates_wrong_is_told(seconds: float, names: tuple[str, ...], words: list[str]) -> None:
    effort = Effort(seconds=seconds, host_room_bytes=64 * 1024**3, device_room_bytes=64 * 1024**3)
    found = machine_warnings(effort, names)
    assert all(said in line for said, line in zip(words, found, strict=True))


def test_a_warning_that_not_all_ranks_have_names_the_rank() -> None:
    assert warnings_of_all([["hot", "narrow"], ["hot"]]) == ["hot", "rank 0: narrow"]


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
    for given, accepted in ((tensors, False), (tensors[2:], True)):
        given_back.clear()
        with pinned(*given, device=CARD) as pinned_all:
            assert pinned_all == accepted
            assert given_back == []
        assert given_back == [given[0].data_ptr()]


PROFILE = replace(
    load("h100"),
    driver="580.1",
    torch_version="2.13.0",
    processor="a processor",
    host_adam_threads=14,
    device_copy_gbps=3000.0,
    contention=(Contention(activities=("h2d", "host_adam"), shares=(0.625, 0.5)),),
    warnings=("something is odd",),
)


def test_each_rate_has_its_percent_where_a_datasheet_is_known() -> None:
    lines = {line.split("  ")[0]: line for line in report(PROFILE).splitlines() if line}
    assert lines["device_copy_gbps"].split() == ["device_copy_gbps", "3000", "89.6%"]
    assert lines["h2d_gbps"].split()[1:] == [dict(PROFILE.rows())["h2d_gbps"]], "no promise, no percent"
    assert lines["h2d + host_adam"].endswith("h2d 62%, host_adam 50%")
    assert report(PROFILE).splitlines()[-1] == "warning: something is odd"
    long = report(replace(PROFILE, warnings=("odd " * 40,))).splitlines()
    assert max(len(line) for line in long if "odd" in line) <= 80
    plain = report(replace(PROFILE, contention=(), warnings=(), host_adam_threads=1))
    assert not any(words in plain for words in ("together", "warning", "threads"))
