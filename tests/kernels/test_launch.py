"""Launches find the compiled kernel of their specialisation, and addresses stay until their launch has read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from protrain_kernels import flatten, launch
from protrain_kernels.launch import SLOT, AddressRing


class _Recorder:
    """Stands in for a ``triton.jit`` function: records what reaches it, and what reaches what it compiled."""

    def __init__(self, *, interpreted: bool = False) -> None:
        self.interpreted = interpreted
        self.through_triton: list[tuple[Any, ...]] = []
        self.through_run: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            self.through_triton.append((grid, arguments, options))
            return None if self.interpreted else _Compiled(self)

        return run


class _Compiled:
    function, packed_metadata = 17, (4, 1, 0)

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def run(self, *arguments: Any) -> None:
        self.recorder.through_run.append(arguments)


def _launch(
    kernel: _Recorder, tensor: torch.Tensor, *, integer: int = 32, factor: float = 0.5, constant: bool = True
) -> None:
    launch.launch(kernel, 3, (tensor,), integer, (factor,), (constant, 1024), {"num_warps": 4}, device_index=-1)


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
        launch.launch(kernel, 1, (tensor,), 0, (), (), {}, device_index=index)
    assert len(kernel.through_triton) == 2, "a GPU has its own compiled kernel"
    assert [arguments[3] for arguments in kernel.through_run] == [101, 100]
    assert current == [0]


def test_bf16_goes_as_its_bits() -> None:
    kernel = _Recorder()
    _launch(kernel, torch.ones(16, dtype=torch.bfloat16))
    bits = kernel.through_triton[0][1][0]
    assert bits.dtype == torch.int16
    assert set(bits.tolist()) == {0x3F80}


@pytest.mark.parametrize(
    "change",
    [
        {"tensor": torch.zeros(64, dtype=torch.int32)},
        {"tensor": torch.zeros(64)[1:]},
        {"integer": 33},
        {"integer": 1},
        {"integer": 1 << 31},
        {"constant": False},
    ],
    ids=["type", "alignment", "not a multiple of 16", "one", "wide", "constant"],
)
def test_whatever_triton_specialises_on_is_compiled_apart(change: dict[str, Any]) -> None:
    kernel = _Recorder()
    values: dict[str, Any] = {"tensor": torch.zeros(64)}
    for each in (values, values | change, values, values | change):
        _launch(kernel, **each)
    assert len(kernel.through_triton) == 2
    assert len(kernel.through_run) == 2


def test_numbers_that_triton_does_not_tell_apart_share_a_kernel() -> None:
    kernel, tensor = _Recorder(), torch.zeros(64)
    for integer, factor in ((32, 0.5), (48, 1.0), (1 << 20, 16.0)):
        _launch(kernel, tensor, integer=integer, factor=factor)
    assert len(kernel.through_triton) == 1


def test_amd_tells_storages_of_more_than_31_bits_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.empty(1 << 31, dtype=torch.uint8, device="meta")
    for told, kernels in ((False, 1), (True, 2)):
        monkeypatch.setattr(launch, "_TELLS_SIZE", told)
        kernel = _Recorder()
        for tensor in (large[:64], large[:64], torch.empty(64, dtype=torch.uint8, device="meta")):
            _launch(kernel, tensor)
        assert len(kernel.through_triton) == kernels


def test_the_interpreter_is_asked_every_time() -> None:
    kernel = _Recorder(interpreted=True)
    for _ in range(2):
        _launch(kernel, torch.zeros(4))
    assert len(kernel.through_triton) == 2


def test_a_ring_keeps_what_launches_may_still_read() -> None:
    ring = AddressRing(torch.device("cpu"), segment_addresses=4 * SLOT)
    starts = [
        ring.put([*range(100 * call, 100 * call + 20)]) for call in range(7)
    ]  # two slots each, two calls a segment
    assert starts == [0, 32, 64, 96, 128, 160, 192]
    for call, start in enumerate(starts):
        assert ring.memory[start : start + 20].tolist() == list(range(100 * call, 100 * call + 20))
    assert all(start % SLOT == 0 for start in starts)
    assert [ring.put([1]), ring.put([2]), ring.put([3])] == [224, 240, 0]


def test_more_addresses_than_a_ring_had_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_rings", {})
    for count in (3, launch._SEGMENT_ADDRESSES + 1, 5):
        memory, start = launch.put_addresses(-1, list(range(count)))
        assert memory[start : start + count].tolist() == list(range(count))
    assert len(launch._rings) == 1


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
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
@needs_gpu
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
@needs_gpu
def test_a_graph_capture_is_refused() -> None:
    source, chunk = torch.ones(64, device="cuda"), torch.zeros(128, device="cuda")
    flatten([source], chunk, [0])
    with pytest.raises(RuntimeError, match="can't be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flatten([source], chunk, [0])


@pytest.mark.gpu
@needs_gpu
def test_a_warm_call_takes_little_host_time() -> None:
    """The gradients of a Llama block into a chunk: 15 us of this thread, and 46 beside 15 busy ones."""
    import time

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
