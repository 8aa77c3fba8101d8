"""Reads and writes the values of parameters, wherever their chunks lie. Callers are inside ``engine.quiet()``.

With several ranks, a parameter may lie in the shards of some of them. So a read is a collective, which all ranks must
call in the same order, and it gives all of them the whole value. A write is given the whole value on every rank, and
each takes what belongs to its own shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protrain.engine.states.chunks import Chunk, Member
from protrain_kernels import join, padded, split, unflatten

_PIECE = 1 << 26  # elements that are split at once, so that this takes little memory beside the parameter


def read_weight(member: Member) -> Tensor:
    """A copy of the weight on the CPU, in the parameter's shape and dtype."""
    return read_weights([member])[0]


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
        unflatten(_whole(chunk, chunk.weight, first, end), [copies[at] for at in found], offsets)
    return copies


def read_master(member: Member) -> Tensor:
    """A copy of the fp32 master on the CPU, in the parameter's shape."""
    chunk = member.chunk
    weight = _read(member, chunk.weight)
    if chunk.master is None:
        return weight.float()
    master = _read(member, chunk.master)
    return join(weight.view(-1), master.view(-1)).view(member.shape) if weight.dtype is torch.bfloat16 else master


def write_master(member: Member, value: Tensor) -> None:
    """Set the fp32 master, and the weight that follows from it."""
    _write_own_master(member, _own(member, value.detach()))


def _write_own_master(member: Member, value: Tensor) -> None:
    """:func:`write_master` for a 1-d ``value`` of what this rank has of the parameter."""
    chunk = member.chunk
    # A value on the device is split there, so that its parts go straight into pinned memory. To move it to the host
    # first would take host memory for all of it.
    device = value.device if value.is_cuda else chunk.weight.device
    flat = value.to(device, torch.float32)
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
    flat = _own(member, value.detach()).to(chunk.weight.device)
    weight = _part(member, chunk.weight)
    if chunk.master is None:
        weight.copy_(flat)
        return
    if value.dtype.itemsize > weight.dtype.itemsize:
        _write_own_master(member, flat.float())
        return
    rounded = split(flat.float())[0] if weight.dtype is torch.bfloat16 else flat.to(weight.dtype)
    _write_own_master(member, torch.where(rounded == weight, _own_master(member), flat.float()))


def read_state(member: Member, name: str) -> Tensor:
    """A copy of ``exp_avg`` or ``exp_avg_sq`` in fp32 on the CPU, in the parameter's shape."""
    return _read(member, _state(member, name)).float()


def write_state(member: Member, name: str, value: Tensor | float) -> None:
    """Set ``exp_avg`` or ``exp_avg_sq``, for example to what :func:`read_state` returned."""
    target = _part(member, _state(member, name))
    if isinstance(value, Tensor):
        target.copy_(_own(member, value))
    else:
        target.fill_(value)


def _part(member: Member, flat: Tensor) -> Tensor:
    """What this rank has of the parameter in ``flat``, a state of its chunk, without padding."""
    return flat[member.own.start : member.own.start + _own_range(member).stop - _own_range(member).start]


def _own(member: Member, value: Tensor) -> Tensor:
    """What this rank has of ``value``, a whole value of the parameter: 1-d and contiguous."""
    return value.contiguous().view(-1)[_own_range(member)]


def _own_range(member: Member) -> slice:
    """The elements of the parameter that this rank has."""
    first = min(member.numel, max(0, member.chunk.shard.start - member.offset))
    return slice(first, min(member.numel, first + member.own.stop - member.own.start))


def _read(member: Member, flat: Tensor) -> Tensor:
    """A copy of the parameter's part of a state of its chunk, on the CPU and in the parameter's shape."""
    whole = _whole(member.chunk, flat, member.offset, member.offset + padded(member.numel))
    return whole[: member.numel].clone().view(member.shape)


def _whole(chunk: Chunk, flat: Tensor, first: int, end: int) -> Tensor:
    """The elements ``first`` to ``end`` of a state of the whole ``chunk``, on the CPU. This rank has ``flat`` of it."""
    if not chunk.ranks.several:
        return flat[first:end].cpu()
    whole = torch.empty(chunk.elements, dtype=flat.dtype, device="cpu")
    whole[chunk.shard].copy_(flat)
    chunk.ranks.share_host(whole, f"state_dict() or another read of chunk {chunk.index}")
    return whole[first:end]


def _own_master(member: Member) -> Tensor:
    """What this rank has of the fp32 master: 1-d."""
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
