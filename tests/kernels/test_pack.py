"""Packed tensors come back bit for bit, laid out as they were, from one buffer of the promised size."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from protrain_kernels import PackPlan, find_masks, pack, unpack
from protrain_kernels.pack_layout import BITS, FP8, GATHER, MASK, RAW, RAW_TILE, TILE

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
# NumPy, under Triton's interpreter, remarks on the infinities and NaN that some tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


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
    masks, fp8 = _masks(), _lossy()
    rules = {"masks": list(range(20, 20 + len(masks))), "fp8": list(range(20 + len(masks), 20 + len(masks) + len(fp8)))}
    everything = [*tensors, *[torch.zeros(1)] * (20 - len(tensors)), *masks, *fp8]
    plan = PackPlan(everything, **rules)
    expected = torch.full((plan.packed_bytes,), 0xA5, dtype=torch.uint8)
    plan.pack(everything, expected)
    packed = backend.pack(_moved(everything, backend.device), **rules)
    assert set(_kinds(plan)) == {RAW, GATHER, BITS, MASK, FP8}
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


def _masks() -> list[torch.Tensor]:
    """Of two bit patterns each: dropout's zero and scale, attention's zero and -inf, signed zeros, two NaN."""
    pick = (_bytes(2 * TILE + 100, 9) > 128).view(-1)
    nans = torch.tensor([0x7FC00001, -0x3FFFFE], dtype=torch.int32).view(torch.float32)
    constant = torch.full((TILE + 1,), -0.0)
    return [
        torch.where(pick, 1.25, 0.0),
        torch.where(pick, -torch.inf, 0.0).bfloat16().view(2, -1).t(),
        torch.where(pick, -0.0, 0.0),
        torch.where(pick, nans[0], nans[1]),
        torch.where(pick, 3.0, torch.nan).half()[5:],
        torch.where(pick, -0.0, -1e-45)[1:],
        constant,
        torch.tensor([7.0]),
        torch.where(pick, 1.0, 2.0).repeat_interleave(3)[1::3],
    ]


@BOTH
def test_masks_become_bits_and_come_back_bit_for_bit(backend: Any, same: Callable[..., None]) -> None:
    for mask in _masks():
        tensor = mask.to(backend.device) if mask.is_contiguous() else mask
        tensor = tensor.to(backend.device)
        assert find_masks([tensor]) == [0]
        packed = backend.pack([tensor], masks=[0])
        assert _kinds(packed.plan) == [MASK]
        tiles = -(-tensor.numel() // TILE)
        assert packed.plan.packed_bytes <= tensor.numel() / 8 + 1 + 16 * tiles + 127
        same(backend.unpack(packed), [tensor])
        assert packed.plan.errors(packed.buffer).tolist() == [0.0]


@BOTH
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_mask_of_three_values_never_comes_back_wrong(backend: Any, dtype: torch.dtype) -> None:
    values = torch.where(_bytes(3 * TILE, 10) > 128, 1.0, 0.0).to(dtype)
    values[TILE + 77] = 0.5
    tensors = [values.to(backend.device), torch.ones(5, device=backend.device)]
    assert find_masks(tensors) == [1]
    packed = backend.pack(tensors, masks=[0])
    found = backend.unpack(packed)[0].cpu()
    assert found[TILE : 2 * TILE].isnan().all()
    assert torch.equal(found[:TILE], values[:TILE])
    assert torch.equal(found[2 * TILE :], values[2 * TILE :])
    errors = packed.plan.errors(packed.buffer).tolist()
    assert errors[0] != errors[0], "a lost mask says NaN"
    assert errors[1] == 0.0


def test_what_is_no_mask_is_not_found() -> None:
    halves = torch.tensor([0.0, -0.0, 1.0])
    assert find_masks([halves, halves[:2], torch.arange(3), torch.zeros(2, dtype=torch.bool), torch.empty(0)]) == [1]


def _lossy() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    spread = torch.randn(2 * TILE + 9, generator=generator) * torch.rand(2 * TILE + 9, generator=generator).pow(8)
    extremes = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, 1.0])
    return [
        spread,
        spread.bfloat16().view(7, -1)[:, ::2] if spread.numel() % 7 == 0 else spread.bfloat16()[::2],
        (spread * 100).half()[1:],
        extremes,
        torch.full((5,), 65504.0).half(),
        torch.full((5,), torch.finfo(torch.bfloat16).max).bfloat16(),
        torch.linspace(-1e-39, 1e-39, 500),
        torch.zeros(3),
    ]


@BOTH
def test_fp8_is_within_its_stated_error_and_measures_it(backend: Any) -> None:
    for tensor in _lossy():
        packed = backend.pack([tensor.to(backend.device)], fp8=[0])
        assert _kinds(packed.plan) == [FP8]
        (found,) = backend.unpack(packed)
        assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
        before, after = tensor.double().reshape(-1), found.cpu().double().reshape(-1)
        finite = before.isfinite()
        assert torch.equal(before[~finite].nan_to_num(nan=7.0), after[~finite].nan_to_num(nan=7.0))
        worst = 0.0
        for first in range(0, before.numel(), TILE):
            part = slice(first, first + TILE)
            keep = finite[part]
            x, y = before[part][keep], after[part][keep]
            largest = x.abs().max().item()
            assert ((x - y).abs() <= x.abs() / 16 + max(largest / 2**17, 2.0**-136)).all()
            worst = max(worst, (x - y).abs().max().item())
        largest = before[finite].abs().max().item()
        (said,) = packed.plan.errors(packed.buffer).tolist()
        assert said == pytest.approx(worst / largest if largest else 0.0, rel=1e-5, abs=1e-6)
        assert 0 < said < 1 / 16 or tensor.numel() < 12 or largest < 1e-38


@BOTH
def test_every_fp8_code_comes_back_as_itself(backend: Any) -> None:
    codes = torch.arange(0, 0x78, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.cat([codes, -codes])
    for scale in (1.0, 2.0**-100, 2.0**100):
        tensor = (values * scale).to(backend.device)
        (found,) = backend.unpack(backend.pack([tensor], fp8=[0]))
        assert torch.equal(found.view(torch.int32), tensor.view(torch.int32))


@BOTH
def test_a_coded_tensor_that_overlaps_another_is_packed_raw(backend: Any, same: Callable[..., None]) -> None:
    values = torch.randn(3000).to(backend.device)
    tensors = [values, values[:100]]
    for rules in ({"fp8": [0]}, {"masks": [1]}):
        packed = backend.pack(tensors, **rules)
        assert _kinds(packed.plan) == [RAW]
        same(backend.unpack(packed), tensors)
    assert _kinds(PackPlan(tensors, fp8=[0, 1])) == [FP8]


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
    assert pack([whole, whole[5:]], fp8=[0, 1]).plan is not first.plan


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
    with pytest.raises(ValueError, match="masks names tensor 2 of 1"):
        PackPlan([whole], masks=[2])
    with pytest.raises(ValueError, match=r"fp8 names tensors\[0\], which is torch\.int64"):
        PackPlan([torch.arange(3)], fp8=[0])
    with pytest.raises(ValueError, match=r"masks and fp8 both name tensors\[0\]"):
        PackPlan([whole], masks=[0], fp8=[0])
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
