"""Reads and writes the values of parameters, wherever their chunks lie. Callers are inside ``engine.quiet()``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protrain.engine.states.chunks import Chunk, Member
from protrain_kernels import join, padded, split, unflatten

_PIECE = 1 << 26  # elements that are split at once, so that this takes little memory beside the parameter


def read_weight(member: Member) -> Tensor:
    """A copy of the weight on the CPU, in the parameter's shape and dtype."""
    return member.view(member.chunk.weight).to("cpu", copy=True)


def read_weights(members: Sequence[Member]) -> list[Tensor]:
    """Copies of the weights of ``members`` on the CPU, with one transfer for each chunk that lies on a GPU."""
    copies = [torch.empty(member.shape, dtype=member.chunk.weight.dtype, device="cpu") for member in members]
    by_chunk: dict[Chunk, list[int]] = {}
    for at, member in enumerate(members):
        by_chunk.setdefault(member.chunk, []).append(at)
    for chunk, found in by_chunk.items():
        first = min(members[at].offset for at in found)
        end = max(members[at].offset + padded(members[at].numel) for at in found)
        offsets = [members[at].offset - first for at in found]
        unflatten(chunk.weight[first:end].cpu(), [copies[at] for at in found], offsets)
    return copies


def read_master(member: Member) -> Tensor:
    """A copy of the fp32 master on the CPU, in the parameter's shape."""
    return _master(member).view(member.shape).to("cpu", copy=True)


def write_master(member: Member, value: Tensor) -> None:
    """Set the fp32 master, and the weight that follows from it."""
    chunk = member.chunk
    # A value on the device is split there, so that its parts go straight into pinned memory. To move it to the host
    # first would take host memory for all of it.
    device = value.device if value.is_cuda else chunk.weight.device
    flat = value.detach().to(device, torch.float32).contiguous().view(-1)
    weight, master = _part(member, chunk.weight), chunk.master
    if master is None:
        weight.copy_(flat)
    elif weight.dtype is torch.bfloat16 and device == weight.device:
        split(flat, weight, _part(member, master))
    elif weight.dtype is torch.bfloat16:
        parts = zip(flat.split(_PIECE), weight.split(_PIECE), _part(member, master).split(_PIECE), strict=True)
        for piece, upper, remainder in parts:
            for target, part in zip((upper, remainder), split(piece), strict=True):
                target.copy_(part)
    else:
        _part(member, master).copy_(flat)
        weight.copy_(flat)


def write_weight(member: Member, value: Tensor) -> None:
    """Set the weight and the master. A master whose weight does not change keeps its lower bits.

    So to load the weights that a 16-bit model already has loses nothing, whether its optimizer state is loaded before
    or after. If ``value`` has a wider type than the weight, it becomes the master.
    """
    chunk = member.chunk
    flat = value.detach().to(chunk.weight.device).contiguous().view(-1)
    weight = _part(member, chunk.weight)
    if chunk.master is None:
        weight.copy_(flat)
        return
    if value.dtype.itemsize > weight.dtype.itemsize:
        write_master(member, flat.float())
        return
    rounded = split(flat.float())[0] if weight.dtype is torch.bfloat16 else flat.to(weight.dtype)
    write_master(member, torch.where(rounded == weight, _master(member), flat.float()))


def read_state(member: Member, name: str) -> Tensor:
    """A copy of ``exp_avg`` or ``exp_avg_sq`` in fp32 on the CPU, in the parameter's shape."""
    return member.view(_state(member, name)).to("cpu", copy=True).float()


def write_state(member: Member, name: str, value: Tensor | float) -> None:
    """Set ``exp_avg`` or ``exp_avg_sq``, for example to what :func:`read_state` returned."""
    target = member.view(_state(member, name))
    if isinstance(value, Tensor):
        target.copy_(value)
    else:
        target.fill_(value)


def _part(member: Member, flat: Tensor) -> Tensor:
    return flat[member.offset : member.offset + member.numel]


def _master(member: Member) -> Tensor:
    chunk = member.chunk
    weight = _part(member, chunk.weight)
    if chunk.master is None:
        return weight.float()
    master = _part(member, chunk.master)
    return join(weight, master) if weight.dtype is torch.bfloat16 else master


def _state(member: Member, name: str) -> Tensor:
    state: Tensor | None = getattr(member.chunk, name)
    assert state is not None, "frozen parameters have no optimizer state"
    return state
