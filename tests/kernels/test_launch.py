"""Launches find the compiled kernel of their specialisation, and addresses stay until their launch has read them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protrain_kernels import flatten, launch
from protrain_kernels.launch import SLOT, AddressRing


class _Recorder:
    """Stands in for a ``triton.jit`` function: records what reaches it, and what reaches what it compiled."""

    def __init__(self) -> None:
        self.through_triton: list[tuple[Any, ...]] = []
        self.through_run: list[tuple[Any, ...]] = []
        self._made = SimpleNamespace(run=self._run, function=17, packed_metadata=(4, 1, 0))

    def _run(self, *arguments: Any) -> None:
        self.through_run.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            self.through_triton.append((grid, arguments, options))
            return self._made

        return run


def _launch(kernel: _Recorder, tensor: torch.Tensor, *, integer: int = 32, factor: float = 0.5, **changes: Any) -> None:
    usual: dict[str, Any] = {"constants": (True, 1024), "options": {"num_warps": 4}, "device_index": -1}
    launch.launch(kernel, 3, (tensor,), integer, (factor,), **(usual | changes))


@pytest.fixture(autouse=True)
def no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_compiled", {})


def test_the_second_launch_skips_triton() -> None:
    kernel, first, second = _Recorder(), torch.zeros(64), torch.zeros(64)
    _launch(kernel, first)
    _launch(kernel, second)
    assert kernel.through_triton == [((3,), (first, 32, 0.5, True, 1024), {"num_warps": 4})]
    stream, nothing = 0, (None, None, None)  # the metadata and hooks of a launch
    own = (second.data_ptr(), 32, 0.5, True, 1024)
    assert kernel.through_run == [(3, 1, 1, stream, 17, (4, 1, 0), *nothing, *own)]
    launch.launch(kernel, 0, (first,), 32, (0.5,), (True, 1024), {"num_warps": 4}, device_index=-1)
    assert len(kernel.through_run) == 1, "of no programs nothing is launched"


def test_addresses_of_host_memory_are_left_to_the_launcher() -> None:
    kernel, tensors = _Recorder(), (torch.zeros(64), torch.zeros(64))
    for _ in range(2):
        launch.launch(kernel, 1, tensors, 0, (), (), {}, device_index=-1, on_host=(1,))
    address, asked = kernel.through_run[0][9:11]
    assert address == tensors[0].data_ptr()
    assert asked is tensors[1]


def test_the_device_of_a_launch_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel, tensor = _Recorder(), torch.zeros(64)
    for index in (1, 1, 0, 0):
        _launch(kernel, tensor, device_index=index)
    assert len(kernel.through_triton) == 2, "a GPU has its own compiled kernel"
    assert [arguments[3] for arguments in kernel.through_run] == [101, 100]
    assert current == [0]


@pytest.mark.parametrize(
    ("change", "kernels"),
    [
        ({"tensor": torch.zeros(64, dtype=torch.int32)}, 2),
        ({"tensor": torch.zeros(64)[1:]}, 2),  # another alignment
        ({"integer": 33}, 2),  # no multiple of 16
        ({"integer": 1}, 2),
        ({"integer": 1 << 31}, 2),  # wide
        ({"constants": (False, 1024)}, 2),
        ({"integer": 48, "factor": 1.0}, 1),
        ({"integer": 1 << 20, "factor": 16.0}, 1),
    ],
    ids=str,
)
def test_whatever_triton_specialises_on_is_compiled_apart(change: dict[str, Any], kernels: int) -> None:
    kernel = _Recorder()
    values: dict[str, Any] = {"tensor": torch.zeros(64)}
    for each in (values, values | change, values, values | change):
        _launch(kernel, **each)
    assert (len(kernel.through_triton), len(kernel.through_run)) == (kernels, 4 - kernels)


def test_amd_tells_storages_of_more_than_31_bits_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.empty(1 << 31, dtype=torch.uint8, device="meta")
    for told, kernels in ((False, 1), (True, 2)):
        monkeypatch.setattr(launch, "_TELLS_SIZE", told)
        kernel = _Recorder()
        for tensor in (large[:64], large[:64], torch.empty(64, dtype=torch.uint8, device="meta")):
            _launch(kernel, tensor)
        assert len(kernel.through_triton) == kernels


def test_a_ring_keeps_what_launches_may_still_read() -> None:
    ring = AddressRing(torch.device("cpu"), segment_addresses=4 * SLOT)
    calls = [[*range(100 * call, 100 * call + 20)] for call in range(7)]  # two slots each, two calls a segment
    starts = [ring.put(call) for call in calls]
    assert starts == [0, 32, 64, 96, 128, 160, 192]
    assert [ring.memory[start : start + 20].tolist() for start in starts] == calls
    assert [ring.put([1]), ring.put([2]), ring.put([3])] == [224, 240, 0]


def test_more_addresses_than_a_ring_had_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_rings", {})
    for count in (3, launch._SEGMENT_ADDRESSES + 1, 5):
        memory, start = launch.put_addresses(-1, list(range(count)))
        assert memory[start : start + count].tolist() == list(range(count))
    assert len(launch._rings) == 1


@pytest.mark.gpu
def test_addresses_of_many_calls_in_flight_are_not_mixed_up() -> None:
    """Far more calls than the ring holds, behind a kernel that keeps the device busy."""
    tensors = [torch.full((64,), float(index), device="cuda") for index in range(64)]
    chunks = torch.empty(6000, 128, device="cuda")
    torch.cuda._sleep(200_000_000)
    for call in range(len(chunks)):
        flatten([tensors[call % 64]], chunks[call], [0])
    expected = torch.arange(len(chunks), device="cuda").remainder(64).float()
    assert torch.equal(chunks[:, :64], expected[:, None].expand(-1, 64))
    assert not chunks[:, 64:].any()


@pytest.mark.gpu
def test_streams_have_rings_of_their_own() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    source, chunks = torch.ones(64, device="cuda"), torch.zeros(2, 128, device="cuda")
    torch.cuda.synchronize()
    for stream, chunk in ((first, chunks[0]), (second, chunks[1])):
        with torch.cuda.stream(stream):
            flatten([source], chunk, [0])
    torch.cuda.synchronize()
    assert chunks[:, :64].sum().item() == 128
    assert {(0, first.cuda_stream), (0, second.cuda_stream)} <= set(launch._rings)


@pytest.mark.gpu
def test_a_graph_capture_is_refused() -> None:
    source, chunk = torch.ones(64, device="cuda"), torch.zeros(128, device="cuda")
    flatten([source], chunk, [0])
    with pytest.raises(RuntimeError, match="can't be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flatten([source], chunk, [0])


@pytest.mark.gpu
def test_a_warm_call_takes_little_host_time() -> None:
    """The gradients of a Llama block into a chunk: 15 us of this thread, and 46 beside 15 busy ones."""
    tensors = [torch.ones(4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(9)]
    offsets = [index * 4096 * 64 for index in range(9)]
    chunk = torch.zeros(9 * 4096 * 64, device="cuda", dtype=torch.bfloat16)
    partials, starts = torch.zeros(9 * 16, device="cuda"), [16 * index for index in range(9)]
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.thread_time()
        for _ in range(50):
            flatten(tensors, chunk, offsets, partials, starts)
        best = min(best, (time.thread_time() - start) / 50)
    assert best < 75e-6
