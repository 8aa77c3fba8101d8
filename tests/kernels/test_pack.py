"""Packed tensors come back bit for bit, laid out as they were, from one buffer of the promised size."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from protrain_kernels import PackPlan, pack, unpack
from protrain_kernels.pack_layout import BITS, GATHER, RAW, RAW_TILE, TILE

BOTH = pytest.mark.parametrize("backend", ["aten", "triton"], indirect=True)  # the CPU runs the reference


@pytest.fixture
def same() -> Callable[[list[torch.Tensor], list[torch.Tensor]], None]:
    """Equal types, shapes, strides and bytes: payloads of NaN too."""

    def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        assert len(found) == len(expected)
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), index
            one, other = (tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in (ours, theirs))
            assert torch.equal(one, other), index

    return check


def _kinds(plan: PackPlan) -> list[int]:
    return [piece.kind for piece in plan._layout.pieces]


def _bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def _saved(device: torch.device) -> list[torch.Tensor]:
    """What a block might save: every awkward layout at once."""
    fused = _bytes(2 * 4 * 6 * 3 * 8).view(torch.bfloat16).view(4, 6, 3, 8).to(device)
    whole = _bytes(4 * 3000, 1).view(torch.float32).to(device)
    table = _bytes(8 * 64 * 50, 2).view(torch.int64).view(64, 50).to(device)
    odd = _bytes(2 * 5001, 3).view(torch.float16).to(device)
    flags = (_bytes(9001, 4) > 127).to(device)
    return [
        *fused.unbind(2),  # three interleaved views that cover one storage
        whole[100:2000],
        whole[1500:2900].view(2, 700).t(),  # overlaps the one before
        whole,
        table[:, 7],  # a column: hardly any of the storage
        table[3:9, 2:48:5],
        odd[1:],  # misaligned by two bytes
        odd[1:].as_strided((100, 50), (25, 1)),  # rows that overlap each other
        flags,
        flags[:3000].view(50, 60)[:, ::7],
        _bytes(16 * 9, 5).view(torch.complex128).view(3, 3).to(device)[:, 1:],
        torch.empty(0, 5, device=device),
        torch.tensor(3.5, device=device),
        _bytes(1, 6).to(device),
        whole[:7].view(7, 1).expand(7, 9),
        _bytes(2 * 2 * 3 * 4 * 5, 7).view(torch.int16).view(2, 3, 4, 5).permute(3, 1, 0, 2).to(device)[1:, :, :, ::2],
        _bytes(RAW_TILE + 4 * TILE + 77, 8).to(device),
    ]


@BOTH
def test_everything_comes_back(backend: Any, same: Callable[..., None]) -> None:
    tensors = _saved(backend.device)
    packed = backend.pack(tensors)
    assert set(_kinds(packed.plan)) == {RAW, GATHER, BITS}
    same(backend.unpack(packed), tensors)


@BOTH
def test_what_is_raw_lies_in_the_buffer_as_in_its_storage(backend: Any, same: Callable[..., None]) -> None:
    tensors = _saved(backend.device)
    packed = backend.pack(tensors)
    found = backend.unpack(packed, in_place=True)
    same(found, tensors)
    base, end = packed.buffer.data_ptr(), packed.buffer.data_ptr() + packed.buffer.nbytes
    inside = [base <= tensor.data_ptr() < end for tensor in found]
    assert inside[:3] == [True] * 3, "views that cover their storage"
    assert not any(tensor.dtype == torch.bool and there for tensor, there in zip(found, inside, strict=True))
    for ours, theirs, there in zip(found, tensors, inside, strict=True):
        if there:
            offset = theirs.storage_offset() * theirs.element_size()
            assert (ours.data_ptr() - base - offset) % 256 == 0
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr() == base


@BOTH
def test_the_buffer_has_the_bytes_of_the_reference(backend: Any) -> None:
    tensors = _saved(torch.device("cpu"))
    plan = PackPlan(tensors)
    expected = torch.full((plan.packed_bytes,), 0xA5, dtype=torch.uint8)
    plan.pack(tensors, expected)
    packed = backend.pack(_moved(tensors, backend.device))
    assert set(_kinds(plan)) == {RAW, GATHER, BITS}
    assert torch.equal(packed.buffer.cpu(), expected)


def _moved(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """On ``device``, views of one storage still views of one."""
    storages: dict[int, torch.Tensor] = {}
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        copy = storages.setdefault(storage.data_ptr(), flat.to(device))
        view = torch.empty(0, dtype=tensor.dtype, device=device)
        found.append(view.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()))
    return found


@BOTH
def test_views_of_one_storage_are_packed_once_and_share_memory_again(backend: Any, same: Callable[..., None]) -> None:
    whole = torch.arange(6000, dtype=torch.float32, device=backend.device)
    tensors = [whole, whole[1000:3000], whole.view(60, 100).t(), whole[2000:].view(torch.int32), whole]
    packed = backend.pack(tensors)
    assert packed.plan.packed_bytes == whole.nbytes
    assert packed.plan.unpacked_bytes == whole.nbytes
    found = backend.unpack(packed)
    same(found, tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    found[0][1500] = -1.0
    assert (found[1][500].item(), found[2][0, 15].item(), found[4][1500].item()) == (-1.0, -1.0, -1.0)


@BOTH
def test_slices_of_a_fused_projection_are_packed_once(backend: Any, same: Callable[..., None]) -> None:
    fused = torch.randn(32, 3, 64).bfloat16().to(backend.device)
    tensors = list(fused.unbind(1))
    packed = backend.pack(tensors)
    assert packed.plan.packed_bytes == fused.nbytes
    same(backend.unpack(packed), tensors)


@BOTH
def test_a_view_with_gaps_is_packed_without_them(backend: Any, same: Callable[..., None]) -> None:
    table = torch.randn(300, 128).to(backend.device)
    tensors = [table[:, 5], table[:, 9], table[:, 5].view(10, 30)]
    packed = backend.pack(tensors)
    assert _kinds(packed.plan) == [GATHER, GATHER]
    assert packed.plan.packed_bytes == 128 * 10 + 300 * 4  # 1200 bytes each, at multiples of 128
    found = backend.unpack(packed)
    same(found, tensors)
    assert found[0].data_ptr() == found[2].data_ptr()


def test_disjoint_parts_of_a_storage_do_not_bring_the_rest() -> None:
    whole = torch.zeros(1 << 20)
    plan = PackPlan([whole[:64], whole[-64:]])
    assert plan.packed_bytes == 2 * 256
    assert plan.unpacked_bytes <= 4 * 256


@BOTH
@pytest.mark.parametrize("shift", range(0, 256, 34))
def test_addresses_come_back_modulo_256(backend: Any, same: Callable[..., None], shift: int) -> None:
    memory = _bytes(2000).to(backend.device)
    tensors = [memory[shift : shift + 1000].view(torch.int16), memory[shift + 1200 : shift + 1300]]
    found = backend.unpack(backend.pack(tensors))
    same(found, tensors)
    for ours, theirs in zip(found, tensors, strict=True):
        offsets = (tensor.storage_offset() * tensor.element_size() % 256 for tensor in (ours, theirs))
        assert next(offsets) == next(offsets)


@BOTH
@pytest.mark.parametrize("count", [1, 7, 8, 9, TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
def test_bools_become_bits(backend: Any, same: Callable[..., None], count: int) -> None:
    flags = _bytes(count, count) > 100
    padded = torch.cat([torch.ones(3, dtype=torch.bool), flags]).to(backend.device)[3:]
    strided = flags.repeat_interleave(2).to(backend.device)[::2]
    for tensor in (flags.to(backend.device), padded, strided):
        packed = backend.pack([tensor])
        assert packed.plan.packed_bytes == -(-count // 8)
        assert packed.buffer[0].item() == sum(1 << bit for bit, flag in enumerate(flags[:8].tolist()) if flag)
        same(backend.unpack(packed), [tensor])


@BOTH
def test_bools_that_overlap_another_type_are_packed_raw(backend: Any, same: Callable[..., None]) -> None:
    """What the other type reads there may be any byte."""
    values = (_bytes(3000, 12)).to(backend.device)
    flags = (_bytes(100, 13) > 127).to(backend.device)
    values[:100] = flags.view(torch.uint8)
    tensors = [values, values[:100].view(torch.bool)]
    packed = backend.pack(tensors)
    assert _kinds(packed.plan) == [RAW]
    same(backend.unpack(packed), tensors)
    both = [flags, flags[10:50]]
    packed = backend.pack(both)
    assert _kinds(packed.plan) == [BITS]
    same(backend.unpack(packed), both)


def test_packing_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("protrain_kernels.pack")  # the package's attribute is the function
    monkeypatch.setattr(module, "_plans", {})
    whole = torch.randn(100)
    first = pack([whole, whole[5:]])
    other = torch.randn(100)
    second = pack([other, other[5:]])
    assert second.plan is first.plan
    assert torch.equal(unpack(second)[1], other[5:])
    assert torch.equal(unpack(first)[0], whole)
    assert pack([whole, other[5:]]).plan is not first.plan


def test_bad_arguments_are_named() -> None:
    whole = torch.zeros(100)
    plan = PackPlan([whole, whole[50:]])
    with pytest.raises(ValueError, match="the tensors differ from those"):
        plan.pack([whole, torch.zeros(50)], torch.zeros(400, dtype=torch.uint8))
    with pytest.raises(ValueError, match="buffer has 399 bytes and needs 400"):
        plan.pack([whole, whole[50:]], torch.zeros(399, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"buffer must be torch\.uint8"):
        plan.unpack(torch.zeros(400))
    with pytest.raises(ValueError, match="buffer must start at a multiple of 16 bytes"):
        plan.unpack(torch.zeros(500, dtype=torch.uint8)[8:])
    with pytest.raises(ValueError, match=r"tensors\[1\] is on meta, tensors\[0\] on cpu"):
        PackPlan([whole, torch.zeros(1, device="meta")])
    with pytest.raises(ValueError, match=r"tensors\[0\] must be a plain strided tensor"):
        PackPlan([torch.eye(3).to_sparse()])
    with pytest.raises(ValueError, match="at least one tensor"):
        PackPlan([])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_a_buffer_in_pinned_memory(same: Callable[..., None]) -> None:
    tensors = _saved(torch.device("cuda"))
    plan = PackPlan(tensors)
    buffer = torch.zeros(plan.packed_bytes, dtype=torch.uint8, pin_memory=True)
    plan.pack(tensors, buffer)
    same(plan.unpack(buffer), tensors)


@pytest.mark.gpu
@needs_gpu
def test_more_bytes_and_elements_than_a_32_bit_integer_counts() -> None:
    count = (1 << 31) + 2 * TILE + 3
    flags = torch.zeros(count, dtype=torch.bool, device="cuda")
    halves = torch.zeros(count, 2, dtype=torch.float16, device="cuda")
    flags[-1] = flags[1 << 31] = True
    halves[-1, 1], halves[(1 << 31) + 1, 0] = 3.0, 2.0
    for tensors in ([flags, halves], [halves[:, 1]]):
        found = unpack(pack(tensors))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, tensors, strict=True))
