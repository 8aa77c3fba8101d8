"""Reading and writing the values of single parameters, wherever their chunk lives. Callers hold ``engine.quiet()``."""

from __future__ import annotations

import torch
from torch import Tensor

from protrain.engine.states.chunks import Member
from protrain_kernels import join, split

_PIECE = 1 << 26  # elements: what is split in one go takes little memory beside the parameter


def read_weight(member: Member) -> Tensor:
    """A copy of the weight on the CPU, in the parameter's shape and dtype."""
    return member.view(member.chunk.weight).to("cpu", copy=True)


def read_master(member: Member) -> Tensor:
    """A copy of the fp32 master on the CPU, in the parameter's shape."""
    return _master(member).view(member.shape).to("cpu", copy=True)


def write_master(member: Member, value: Tensor) -> None:
    """Set the fp32 master, and the weight that follows from it."""
    chunk = member.chunk
    # What the device has made is split there, so that the parts go straight into pinned memory: the whole would go into
    # memory of its own before.
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
    """Set the weight. Where that changes nothing a master keeps its lower bits; elsewhere it becomes ``value``.

    So loading the weights that a 16-bit model already has, before or after its optimizer state, loses nothing. A wider
    ``value`` says more than a weight can hold: it is what the master becomes.
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
    """Set ``exp_avg`` or ``exp_avg_sq``; what :func:`read_state` returned is what it was."""
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
