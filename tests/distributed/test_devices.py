"""Each process trains on a GPU of its own, and errors say how: rules, indices that do not exist, and shared GPUs."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.distributed.devices import has_bf16, own_device
from protrain.hardware.detection import detect
from tests.distributed.pool import errors_on
from tests.distributed.test_out_of_step import quick

X = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("kind", "major", "hip", "has"),
    [
        *(("cuda", 7, None, False), ("cuda", 8, None, True), ("cuda", 12, None, True)),
        *(("cuda", 7, "6.4", True), ("cpu", 0, None, True)),
    ],
)
def test_cards_before_ampere_have_no_bf16(
    monkeypatch: pytest.MonkeyPatch, kind: str, major: int, hip: str | None, has: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(major=major))
    monkeypatch.setattr("torch.version.hip", hip)
    assert has_bf16(torch.device(kind)) is has


@pytest.mark.parametrize(("dtype", "warns"), [("bfloat16", True), ("float32", False)])
def test_a_card_without_bf16_is_warned_of(monkeypatch: pytest.MonkeyPatch, dtype: str, warns: bool) -> None:
    monkeypatch.setattr("protrain.validate.has_bf16", lambda device: False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    model = nn.Linear(8, 8)
    with warnings.catch_warnings(record=True, action="always") as caught:
        protrain.wrap(model, torch.optim.AdamW(model.parameters()), device="cpu", dtype=dtype, progress=False)
    said = [str(each.message) for each in caught if "Tesla T4 has no units for bfloat16" in str(each.message)]
    assert len(said) == warns


@contextmanager
def machine(
    *, visible: int, uuids: Sequence[str] = (), current: int | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A process that sees as many GPUs. ``current`` is that of the script, and None before CUDA is used."""

    def current_device() -> int:
        assert current is not None, "asking would start CUDA"
        return current

    def get_device_properties(device: torch.device) -> Any:
        return SimpleNamespace(uuid=uuids[device.index], major=9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: visible > 0)
        patch.setattr(torch.cuda, "device_count", lambda: visible)
        patch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
        patch.setattr(torch.cuda, "current_device", current_device)
        patch.setattr(torch.cuda, "get_device_properties", get_device_properties)
        for name in ("WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES") if environment is not None else ():
            patch.delenv(name, raising=False)
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        yield


SEVERAL = {"WORLD_SIZE": "4", "LOCAL_RANK": "2"}


@pytest.mark.parametrize(
    ("visible", "current", "environment", "expected"),
    [
        pytest.param(4, None, {}, 0, id="one process"),
        pytest.param(4, 3, {}, 3, id="one process that has chosen"),
        pytest.param(4, 1, {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 1, id="torchrun with one process"),
        pytest.param(4, 0, SEVERAL, 2, id="torchrun, where CUDA has been used without a choice"),
        pytest.param(4, 3, SEVERAL, 3, id="torchrun, and a script that has chosen"),
        pytest.param(1, None, SEVERAL, 0, id="srun --gpus-per-task=1"),
    ],
)
def test_the_gpu_of_a_process(visible: int, current: int | None, environment: Mapping[str, str], expected: int) -> None:
    with machine(visible=visible, current=current, environment=environment):
        for device in (None, "cuda", torch.device("cuda")):
            assert own_device(device) == torch.device("cuda", expected)
        assert own_device("cpu") == torch.device("cpu")
        for index in range(visible):  # one that the user gives wins
            assert own_device(f"cuda:{index}") == own_device(torch.device("cuda", index)) == torch.device("cuda", index)


def test_without_a_gpu_it_is_the_cpu() -> None:
    with machine(visible=0, environment=SEVERAL):
        assert own_device() == torch.device("cpu")
        with pytest.raises(ValueError, match="device='cuda:1', but there is no CUDA GPU here: pass device='cpu'"):
            own_device("cuda:1")


def wrap(device: str | None) -> object:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return protrain.wrap(model, torch.optim.AdamW(model.parameters()), example_batch=X, device=device, progress=False)


def calibrate(device: str | None) -> object:
    return protrain.calibrate(device, seconds=0.02, save=False)


def profile(device: str | None) -> object:
    return protrain.profile(nn.Linear(8, 8), (X,), device=device)


@pytest.mark.parametrize("use", [wrap, calibrate, profile, detect])
def test_a_gpu_that_does_not_exist(use: Callable[[str], object]) -> None:
    words = r"device='cuda:9', but this process sees 2 GPUs \(CUDA_VISIBLE_DEVICES is '5,6'\), counted from 0: pass "
    with (
        machine(visible=2, environment={"CUDA_VISIBLE_DEVICES": "5,6"}),
        pytest.raises(ValueError, match=words + "device='cuda' for the GPU of this process"),
    ):
        use("cuda:9")


# -- several ranks -----------------------------------------------------------------------------------------------------


def wrap_with_gpus(
    rank: int, device: str | None, visible: int, uuids: Sequence[Sequence[str]], local_ranks: Sequence[int]
) -> None:
    """Each rank sees GPUs with its ``uuids``."""
    environment = {"WORLD_SIZE": "2", "LOCAL_RANK": str(local_ranks[rank]), "CUDA_VISIBLE_DEVICES": "0,1"}
    with quick(), machine(visible=visible, uuids=uuids[rank], environment=environment):
        wrap(device)


@pytest.mark.parametrize(
    ("device", "visible", "uuids"),
    [
        pytest.param("cuda:1", 2, (("a", "b"), ("a", "b")), id="the same index"),
        pytest.param(None, 1, (("b",), ("b",)), id="the only GPU of both"),
        pytest.param("cuda:1", 2, (("a", "b"), ("c", "b")), id="seen among others"),
    ],
)
def test_two_ranks_on_one_gpu_are_refused_on_both(
    device: str | None, visible: int, uuids: Sequence[Sequence[str]]
) -> None:
    for error in errors_on(2, wrap_with_gpus, device, visible, uuids, (0, 1)):
        assert error.startswith(
            f"ValueError: ranks 0 and 1 are on the same GPU, GPU-b of {socket.gethostname()}, and each needs its own: "
        )


def test_more_processes_than_gpus_are_refused() -> None:
    gpus = ("a", "b")
    other, mine = errors_on(2, wrap_with_gpus, None, 2, (gpus, gpus), (0, 2))
    assert mine.startswith(
        "ValueError: LOCAL_RANK is 2, but this process sees 2 GPUs (CUDA_VISIBLE_DEVICES is '0,1'): "
    )
    assert other.startswith("MisuseError: rank 1 has raised an exception in protrain.wrap, while rank 0 went on to ")
    assert other.endswith(mine)
