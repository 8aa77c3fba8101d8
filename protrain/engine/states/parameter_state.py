"""Reads and writes weights and optimizer states of single parameters, wherever their chunks lie.

Callers are inside ``engine.quiet()``. What is read comes back on the CPU.

With several ranks, a parameter may lie in the shards of some of them. What a rank has of it is one run of its elements,
in the order of a contiguous tensor:

- ``read_local_master`` copies that run, or some of it, and ``export_part`` tells of it. Other ranks need not call them.
- ``whole`` makes whole values of such copies, and ``read_weights`` reads whole weights. Both are collectives, which all
  ranks must call in the same order, and give all of them the same.
- ``write_...`` and ``import_...`` are given the whole value or any run of its elements, and take from that what this
  rank has. To set a parameter, every rank must be given what it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from protrain.engine.states.chunks import Chunk, Member
from protrain_kernels import join, split, unflatten

_STATES = ("exp_avg", "exp_avg_sq")
_ALL = slice(None)
_PIECE_ELEMENTS = 1 << 20  # elements that are split at once, so that this takes little memory beside the parameter


def local_elements(member: Member) -> slice:
    """The elements of the parameter that this rank has."""
    first = min(member.numel, max(0, member.chunk.shard.start - member.offset))
    return slice(first, min(member.numel, first + member.shard_slice.stop - member.shard_slice.start))


def read_local_master(member: Member, elements: slice = _ALL) -> Tensor:
    """A copy of what this rank has of the fp32 master, or of these ``elements`` of that: 1-d, on the CPU."""
    weight, master = _copy(member, member.chunk.weight, elements), member.chunk.master
    return _master_of(weight, None if master is None else _copy(member, master, elements))


def whole(member: Member, local: Tensor) -> Tensor:
    """The whole value of which this rank has ``local``, on the CPU and in any shape, in the parameter's shape."""
    return _assembled(member.chunk, local.view(-1), member.offset, member.offset + member.numel).view(member.shape)


def read_weight(member: Member) -> Tensor:
    """A copy of the weight on the CPU, in the parameter's shape and dtype. All ranks must call it."""
    return read_weights([member])[0]


def read_weights(members: Sequence[Member]) -> list[Tensor]:
    """Copies as ``read_weight`` makes them, with one transfer and one exchange for each chunk."""
    copies = [torch.empty(member.shape, dtype=member.chunk.weight.dtype, device="cpu") for member in members]
    by_chunk: dict[Chunk, list[int]] = {}
    for at, member in enumerate(members):
        by_chunk.setdefault(member.chunk, []).append(at)
    for chunk, found in by_chunk.items():
        first = min(members[at].offset for at in found)
        stop = max(members[at].stop for at in found)
        local = chunk.weight[max(0, first - chunk.shard.start) : max(0, stop - chunk.shard.start)].cpu()
        offsets = [members[at].offset - first for at in found]
        unflatten(_assembled(chunk, local, first, stop), [copies[at] for at in found], offsets)
    return copies


def write_master(member: Member, value: Tensor, elements: slice | None = None) -> None:
    """Set ``elements`` of the fp32 master, or all of it, and of the weight that follows from it."""
    _write_own_master(member.chunk, *_overlap(member, value, elements))


def _write_own_master(chunk: Chunk, target: slice, value: Tensor) -> None:
    # A value on the device is split there, so that its parts go straight into pinned memory. To move it to the host
    # first would take host memory for all of it.
    flat = value.to(value.device if value.is_cuda else chunk.weight.device, torch.float32)
    weight, master = chunk.weight[target], chunk.master
    if master is None:
        weight.copy_(flat)
    elif weight.dtype is torch.bfloat16:
        pieces = (each.split(_PIECE_ELEMENTS) for each in (flat, weight, master[target]))
        for piece, *places in zip(*pieces, strict=True):
            for place, half in zip(places, split(piece), strict=True):
                place.copy_(half)
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
    flat = flat.to(chunk.weight.device)
    weight = chunk.weight[target]
    if chunk.master is None:
        weight.copy_(flat)
        return
    if value.dtype.itemsize <= weight.dtype.itemsize:
        rounded = split(flat.float())[0] if weight.dtype is torch.bfloat16 else flat.to(weight.dtype)
        master = _master_of(weight, chunk.master[target])
        # Bits are compared, as 0 and -0 are equal and NaN is not equal to itself.
        flat = torch.where(rounded.view(torch.int16) == weight.view(torch.int16), master, flat.float())
    _write_own_master(chunk, target, flat)


@dataclass(frozen=True)
class StateInPlace:
    """What one rank has of a state of a parameter, still in its chunk, so that it takes no memory.

    Args:
        shape: that of the parameter if the rank has all of it, and 1-d otherwise.
        dtype: of what is read.
        read: copies elements of it, in the order of a contiguous tensor, to a 1-d tensor on the CPU.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[slice], Tensor]

    @property
    def nbytes(self) -> int:
        """The memory that a copy of all of it takes."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """What one rank has of a parameter: a run of its elements, in the order of a contiguous tensor.

    Args:
        shape: of the whole parameter.
        elements: the run.
        tensors: its states, each a tensor on the CPU or a ``StateInPlace``. They have the shape of the parameter if the
            run is all of it, and are 1-d otherwise. A frozen parameter has ``weight``, and any other ``master``,
            ``exp_avg`` and ``exp_avg_sq`` (fp32) and ``step`` (0-d).
    """

    shape: torch.Size
    elements: slice
    tensors: Mapping[str, Any]

    def copies(self) -> dict[str, Tensor]:
        """The ``tensors``, of which those that lie in place are copied to the CPU."""
        return {k: t if isinstance(t, Tensor) else t.read(_ALL).view(t.shape) for k, t in self.tensors.items()}


def export_part(member: Member) -> Part:
    """What this rank has of ``member``, in place. Other ranks need not call it."""
    local = local_elements(member)
    frozen = member.group < 0
    shape = member.shape if local == slice(0, member.numel) else torch.Size([local.stop - local.start])
    dtype = member.chunk.weight.dtype if frozen else torch.float32
    states = {
        kind: StateInPlace(shape, dtype, partial(_read, member, kind, dtype))
        for kind in (("weight",) if frozen else ("master", *_STATES))
    }
    step = torch.tensor(member.steps, dtype=torch.float32, device="cpu")
    return Part(member.shape, local, states if frozen else {"step": step, **states})


def export_parameter(member: Member) -> dict[str, Tensor]:
    """The tensors of ``export_part`` for the whole parameter. All ranks must call it."""
    return _whole(member, export_part(member).copies())


def export_state(member: Member) -> dict[str, Any]:
    """Copies of all states of ``member`` in the format of torch.optim.AdamW, and of the ``master`` if there is one.

    With the master comes ``master_step``, the step at which it was exported. Other optimizers keep the master in their
    state but do not update it. When their state is loaded here, the old master must not replace the weight that they
    have trained. The step is no tensor, as other optimizers cast tensors. All ranks must call it.
    """
    local = export_part(member).copies()
    if member.chunk.master is None:
        del local["master"]  # it is the weight
    state = _whole(member, local)
    return {**state, "master_step": member.steps} if "master" in state else state


def import_part(member: Member, tensors: Mapping[str, Any], elements: slice | None = None) -> None:
    """Set ``elements`` of ``member``, or all, to ``tensors`` with the names of those of a ``Part`` or ``export_state``.

    States that are missing become those of an untrained model.
    """
    if "weight" in tensors or member.group < 0:  # a frozen one has a master if it was trainable when it was saved
        write_weight(member, tensors["weight" if "weight" in tensors else "master"], elements)
    if member.group < 0:
        return
    member.steps = int(tensors.get("step", 0))
    target, part = _within(member, elements)
    for name in _STATES:
        state = getattr(member.chunk, name)[target]
        state.copy_(tensors[name].detach().contiguous().view(-1)[part] if name in tensors else torch.zeros(()))
    if "master" in tensors and tensors.get("master_step", member.steps) == member.steps:
        write_master(member, tensors["master"], elements)


def check_state(name: str, shape: torch.Size, state: Mapping[str, Any]) -> None:
    """ValueError if an optimizer's ``state`` of the parameter ``name``, which has ``shape``, is not that of Adam.

    An empty one is that of a parameter that was never updated.
    """
    missing = [kind for kind in ("step", *_STATES) if kind not in state]
    if state and missing:
        raise ValueError(
            f"the state of {name} lacks {missing[0]!r} and has {', '.join(map(repr, state))}: load a state of Adam or "
            "AdamW, or one without entries for parameters that are to begin anew"
        )
    check_shapes(name, shape, state)
    step = state.get("step", 0)
    if isinstance(step, Tensor):
        step = step.item() if step.numel() == 1 else step.tolist()
    if not isinstance(step, int | float) or not 0 <= step < math.inf or step != int(step):
        raise ValueError(f"step of {name} must be a whole number from 0 on, not {step!r}")


def check_shapes(name: str, shape: torch.Size, tensors: Mapping[str, Any]) -> None:
    """ValueError if ``tensors`` are not states of the parameter ``name``, which has ``shape``."""
    for kind in ("master", "weight", *_STATES):
        if kind in tensors and tensors[kind].shape != shape:
            raise ValueError(
                f"{kind} of {name} has shape {tuple(tensors[kind].shape)}, the model's is "
                f"{tuple(shape)}: load a state of the same model"
            )


def _read(member: Member, kind: str, dtype: torch.dtype, elements: slice) -> Tensor:
    """A copy of ``elements`` of what this rank has of a state in a ``Part``: 1-d, on the CPU."""
    if kind == "master":
        return read_local_master(member, elements)
    return _copy(member, getattr(member.chunk, kind), elements).to(dtype)


def _whole(member: Member, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value if name == "step" else whole(member, value) for name, value in tensors.items()}


def _copy(member: Member, flat: Tensor, elements: slice) -> Tensor:
    """A copy on the CPU of ``elements`` of what this rank has of the parameter in ``flat``, a state of its chunk."""
    return flat[_within(member, None)[0]][elements].to("cpu", copy=True)


def _within(member: Member, elements: slice | None) -> tuple[slice, slice]:
    """What this rank has of ``elements`` of the parameter: its place in the states, and in ``elements``."""
    local = local_elements(member)
    given = slice(0, member.numel) if elements is None else elements
    first = max(local.start, given.start)
    stop = max(first, min(local.stop, given.stop))
    at = member.shard_slice.start + first - local.start
    return slice(at, at + stop - first), slice(first - given.start, stop - given.start)


def _overlap(member: Member, value: Tensor, elements: slice | None) -> tuple[slice, Tensor]:
    """What this rank has of ``elements``: its place in the states, and its ``value``, 1-d."""
    target, part = _within(member, elements)
    return target, value.detach().contiguous().view(-1)[part]


def _assembled(chunk: Chunk, local: Tensor, first: int, stop: int) -> Tensor:
    """The elements ``first`` to ``stop`` of a state of the whole ``chunk``. This rank has ``local`` of them, on a CPU.

    Each rank that has some sends these alone, so that nothing travels that is not needed.
    """
    ranks = chunk.ranks
    if not ranks.several:
        return local
    found = torch.empty(stop - first, dtype=local.dtype, device="cpu")
    for rank in range(ranks.size):
        shard = rank * chunk.shard_elements - first
        piece = found[max(0, shard) : max(0, shard + chunk.shard_elements)]
        if rank == ranks.rank:
            piece.copy_(local)
        if piece.numel():
            ranks.broadcast(piece, f"a read of chunk {chunk.index}", source=rank)
    return found


def _master_of(weight: Tensor, master: Tensor | None) -> Tensor:
    """The fp32 master of which these are the parts that a chunk keeps."""
    if master is None:
        return weight.float()
    return join(weight, master) if weight.dtype is torch.bfloat16 else master
