"""Packed tensors come back bit for bit, laid out as they were, from one buffer that has each storage once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protrain_kernels import pack, padded, unpack


def check_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal types, shapes, strides and bytes: payloads of NaN too."""
    assert len(found) == len(expected)
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), index
        one, other = (tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in (ours, theirs))
        assert torch.equal(one, other), index


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
        table[:, 7],
        table[3:9, 2:48:5],
        odd[1:],  # misaligned by two bytes
        odd[1:].as_strided((100, 50), (25, 1)),  # rows that overlap each other
        flags,
        flags[:3000].view(50, 60)[:, ::7],
        _bytes(16 * 9, 5).view(torch.complex128).view(3, 3).to(device)[:, 1:],
        torch.empty(0, 5, device=device),
        torch.tensor(3.5, device=device),
        *(_bytes(count, count).to(device) for count in (1, 255, 256, 257, 65536 + 77)),
        whole[:7].view(7, 1).expand(7, 9),
        _bytes(2 * 2 * 3 * 4 * 5, 7).view(torch.int16).view(2, 3, 4, 5).permute(3, 1, 0, 2).to(device)[1:, :, :, ::2],
    ]


def test_everything_comes_back_as_views_of_the_buffer(backend: Any) -> None:
    tensors = _saved(backend.device)
    packed = pack(tensors)
    found = unpack(packed)
    check_same(found, tensors)
    assert {tensor.untyped_storage().data_ptr() for tensor in found} == {packed.buffer.data_ptr()}
    for ours, theirs in zip(found, tensors, strict=True):
        assert (ours.storage_offset() - theirs.storage_offset()) * ours.element_size() % 256 == 0
    check_same(unpack(packed._replace(views=packed.views[3:5])), tensors[3:5])
    room = torch.zeros(packed.buffer.numel() + 256, dtype=torch.uint8)  # a copy of the buffer serves as well
    check_same(unpack(packed._replace(buffer=room[256:].copy_(packed.buffer))), tensors)
    copies = unpack(packed, copies=True)
    packed.buffer.zero_()
    check_same(copies, tensors)
    for ours, theirs in zip(copies, tensors, strict=True):
        assert (ours.storage_offset() - theirs.storage_offset()) * ours.element_size() % 256 == 0


def test_views_of_one_storage_are_packed_once_and_share_memory_again(backend: Any) -> None:
    whole = torch.arange(6000, dtype=torch.float32, device=backend.device)
    tensors = [whole, whole[1000:3000], whole.view(60, 100).t(), whole[2000:].view(torch.int32), whole]
    packed = pack(tensors)
    assert packed.buffer.nbytes == 2 * padded(2 * 6000)
    found = unpack(packed)
    check_same(found, tensors)
    found[0][1500] = -1.0
    assert (found[1][500].item(), found[2][0, 15].item(), found[4][1500].item()) == (-1.0, -1.0, -1.0)


@pytest.mark.gpu
def test_more_bytes_than_a_32_bit_integer_counts() -> None:
    halves = torch.zeros((1 << 31) + 3, 2, dtype=torch.float16, device="cuda")
    halves[-1, 1], halves[(1 << 31) + 1, 0] = 3.0, 2.0
    (found,) = unpack(pack([halves]))
    assert torch.equal(found, halves)
