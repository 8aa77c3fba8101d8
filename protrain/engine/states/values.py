"""Reads and writes the values of parameters, wherever their chunks lie. Callers are inside ``engine.quiet()``.

With several ranks, a parameter may lie in the shards of some of them. What a rank has of it is one run of its elements,
in the order of a contiguous tensor:

- ``read_own_...`` copies that run. Other ranks need not call it.
- ``whole`` makes whole values of such copies, and ``read_weights`` reads whole weights. Both are collectives, which all
  ranks must call in the same order, and give all of them the same.
- ``write_...`` is given the whole value or any run of its elements, and takes from that what this rank has. To set a
  parameter, every rank must be given what it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protrain.engine.states.chunks import Chunk, Member
from protrain_kernels import join, split, unflatten

_PIECE = 1 << 26  # elements that are split at once, so that this takes little memory beside the parameter


def own_elements(member: Member) -> slice:
    """The elements of the parameter that this rank has."""
    first = min(member.numel, max(0, member.chunk.shard.start - member.offset))
    return slice(first, min(member.numel, first + member.own.stop - member.own.start))


def read_own_weight(member: Member) -> Tensor:
    """A copy of what this rank has of the weight: 1-d, on the CPU."""
    return _copy(member, member.chunk.weight)


def read_own_master(member: Member) -> Tensor:
    """A copy of what this rank has of the fp32 master: 1-d, on the CPU."""
    weight, master = read_own_weight(member), member.chunk.master
    return _master_of(weight, None if master is None else _copy(member, master))


def read_own_state(member: Member, name: str) -> Tensor:
    """A copy of what this rank has of ``exp_avg`` or ``exp_avg_sq``: fp32, 1-d, on the CPU."""
    return _copy(member, _state(member, name)).float()


def whole(member: Member, own: Tensor) -> Tensor:
    """The whole value of which this rank has ``own``, on the CPU and in any shape, in the parameter's shape."""
    return _assembled(member.chunk, own.view(-1), member.offset, member.offset + member.numel).view(member.shape)


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
        stop = max(members[at].stop for at in found)
        own = chunk.weight[max(0, first - chunk.shard.start) : max(0, stop - chunk.shard.start)].cpu()
        offsets = [members[at].offset - first for at in found]
        unflatten(_assembled(chunk, own, first, stop), [copies[at] for at in found], offsets)
    return copies


def write_master(member: Member, value: Tensor, elements: slice | None = None) -> None:
    """Set ``elements`` of the fp32 master, or all of it, and of the weight that follows from it."""
    target, flat = _overlap(member, value, elements)
    if flat.numel():
        _write_own_master(member.chunk, target, flat)


def _write_own_master(chunk: Chunk, target: slice, value: Tensor) -> None:
    # A value on the device is split there, so that its parts go straight into pinned memory. To move it to the host
    # first would take host memory for all of it.
    device = value.device if value.is_cuda else chunk.weight.device
    flat = value.to(device, torch.float32)
    weight, master = chunk.weight[target], chunk.master
    if master is None:
        weight.copy_(flat)
    elif weight.dtype is torch.bfloat16 and device == weight.device:
        split(flat, weight, master[target])
    elif weight.dtype is torch.bfloat16:
        parts = zip(flat.split(_PIECE), weight.split(_PIECE), master[target].split(_PIECE), strict=True)
        for piece, upper, remainder in parts:
            for place, part in zip((upper, remainder), split(piece), strict=True):
                place.copy_(part)
    else:
        master[target].copy_(flat)
        weight.copy_(flat)


def write_weight(member: Member, value: Tensor, elements: slice | None = None) -> None:
    """Set ``elements`` of the weight, or all of it, and of the master. An unchanged weight keeps its whole master.

    So to load the weights that a 16-bit model already has loses nothing, whether its optimizer state is loaded before
    or after. If ``value`` has a wider type than the weight, it becomes the master.
    """
    chunk = member.chunk
    target, flat = _overlap(member, value, elements)
    if not flat.numel():
        return
    flat = flat.to(chunk.weight.device)
    weight = chunk.weight[target]
    if chunk.master is None:
        weight.copy_(flat)
        return
    if value.dtype.itemsize > weight.dtype.itemsize:
        _write_own_master(chunk, target, flat.float())
        return
    rounded = split(flat.float())[0] if weight.dtype is torch.bfloat16 else flat.to(weight.dtype)
    master = _master_of(weight, chunk.master[target])
    _write_own_master(chunk, target, torch.where(rounded == weight, master, flat.float()))


def write_state(member: Member, name: str, value: Tensor | float, elements: slice | None = None) -> None:
    """Set ``elements`` of ``exp_avg`` or ``exp_avg_sq``, or all of it."""
    state = _state(member, name)
    if isinstance(value, Tensor):
        target, flat = _overlap(member, value, elements)
        state[target].copy_(flat)
    else:
        state[_within(member, elements)[0]].fill_(value)


def _copy(member: Member, flat: Tensor) -> Tensor:
    """A copy on the CPU of what this rank has of the parameter in ``flat``, a state of its chunk, without padding."""
    return flat[_within(member, None)[0]].to("cpu", copy=True)


def _within(member: Member, elements: slice | None) -> tuple[slice, slice]:
    """What this rank has of ``elements`` of the parameter: its place in the states, and in ``elements``."""
    own = own_elements(member)
    given = slice(0, member.numel) if elements is None else elements
    first = max(own.start, given.start)
    stop = max(first, min(own.stop, given.stop))
    at = member.own.start + first - own.start
    return slice(at, at + stop - first), slice(first - given.start, stop - given.start)


def _overlap(member: Member, value: Tensor, elements: slice | None) -> tuple[slice, Tensor]:
    """What this rank has of ``elements``: its place in the states, and its ``value``, 1-d."""
    target, part = _within(member, elements)
    return target, value.detach().contiguous().view(-1)[part]


def _assembled(chunk: Chunk, own: Tensor, first: int, stop: int) -> Tensor:
    """The elements ``first`` to ``stop`` of a state of the whole ``chunk``. This rank has ``own`` of them, on the CPU.

    Each rank that has some sends these alone, so that nothing travels that is not needed.
    """
    ranks = chunk.ranks
    if not ranks.several:
        return own
    found = torch.empty(stop - first, dtype=own.dtype, device="cpu")
    for rank in range(ranks.size):
        shard = rank * chunk.shard_elements - first
        piece = found[max(0, shard) : max(0, shard + chunk.shard_elements)]
        if rank == ranks.rank:
            piece.copy_(own)
        if piece.numel():
            ranks.broadcast(piece, f"a read of chunk {chunk.index}", source=rank)
    return found


def _master_of(weight: Tensor, master: Tensor | None) -> Tensor:
    """The fp32 master of which these are the parts that a chunk keeps."""
    if master is None:
        return weight.float()
    return join(weight, master) if weight.dtype is torch.bfloat16 else master


def _state(member: Member, name: str) -> Tensor:
    state: Tensor | None = getattr(member.chunk, name)
    assert state is not None, "frozen parameters have no optimizer state"
    return state
