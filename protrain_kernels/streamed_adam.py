"""AdamW by the GPU on states that live in host memory: the formula and the bits of ``adam``.

States and gradient go through an ``AdamStaging`` area of the device, one piece after another in two slots in turn. A
piece is copied in on one stream, updated on another and copied out on a third, so that the three overlap.

Bytes over the link a parameter, with bf16 weight, remainder and gradient: 14 in and 12 out at the same time, or 10 and
8 with moments in bf16.

A kernel that reads and writes host memory itself is the faster way alone. Beside it, however, uploads took 38 ms where
they took 15 ms beside copies, and matrix products ran at half their rate, so it is not used.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from protrain_kernels.adam import adam, check_adam, launch_adam
from protrain_kernels.adam_types import AdamScalars
from protrain_kernels.checks import ALIGNMENT_BYTES, PADDING, check_scalar

_SLOTS = 2  # pieces in flight: one is copied in while the other is copied out


class AdamStaging:
    """Device memory, streams and events through which ``streamed_adam`` moves states; made once, used by many calls.

    It must be kept until the event of the last call is reached, because its memory belongs to the stream that was
    current when it was made.

    Args:
        device: where the updates run. On the CPU, which stands in for a GPU, torch's streams and events do nothing.
        size_bytes: device memory to take, at least 4,608: 128 parameters a slot. Pieces of 8 to 64 MiB a tensor reach
            the full rate of a copy engine.
        upload: the stream of the copies to the device; made when None.
        download: the stream of the copies to the host; made when None.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        size_bytes: int = 128 << 20,
        upload: torch.cuda.Stream | None = None,
        download: torch.cuda.Stream | None = None,
    ) -> None:
        self.slot_bytes = size_bytes // _SLOTS // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.memory = torch.empty(_SLOTS * self.slot_bytes, dtype=torch.uint8, device=device)
        self.device = self.memory.device  # with its index
        self.api: Any = torch.get_device_module(self.device)  # streams and events of the device
        self.upload: Any = self.api.Stream(self.device) if upload is None else upload
        self.download: Any = self.api.Stream(self.device) if download is None else download
        self.started: Any = self.api.Event()
        self.slots = itertools.cycle([self._slot(memory) for memory in self.memory.split(self.slot_bytes)])

    def _slot(self, memory: torch.Tensor) -> Slot:
        slot = Slot(memory, self.api.Event(), self.api.Event(), self.api.Event())
        # Until now the memory may have been another tensor's on the current stream.
        slot.drained.record(self.api.current_stream(self.device))
        return slot

    @contextlib.contextmanager
    def on(self, stream: Any, *, after: Any, done: Any) -> Iterator[None]:
        """Queue the body on a stream, behind the event ``after``, and record the event ``done`` behind it."""
        with self.api.stream(stream):
            after.wait(stream)
            yield
            done.record(stream)


class Slot(NamedTuple):
    """Room for one piece, and the events of its way."""

    memory: torch.Tensor
    filled: Any
    updated: Any
    drained: Any


def streamed_adam(
    weight: torch.Tensor,  # [n] bfloat16, float16 or float32
    master: torch.Tensor | None,  # [n] int16, float32 or None
    exp_avg: torch.Tensor,  # [n] float32 or bfloat16
    exp_avg_sq: torch.Tensor,  # [n] of the same type
    grad: torch.Tensor,  # [n] the weight's type or float32
    scalars: AdamScalars,
    staging: AdamStaging,
    *,
    gradient_factor: float = 1.0,
    scale: torch.Tensor | None = None,  # one float32 on the device
) -> torch.cuda.Event:
    """One Adam step by the device of ``staging`` on tensors in pinned host memory.

    The work is queued behind what the current stream of the device holds. Host and device may use the states again
    once the event of the call is reached.

    Args:
        weight: as ``adam`` takes it, in pinned host memory.
        master: likewise.
        exp_avg: likewise.
        exp_avg_sq: likewise.
        grad: likewise; unchanged.
        scalars: this step's constants.
        staging: what the states and the gradient are copied through.
        gradient_factor: as ``adam`` takes it.
        scale: multiplies the rounded gradient.

    Returns:
        An event that is reached when all results are in place. On the CPU they are in place on return.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length, or is not pinned.
    """
    named = {"weight": weight, "master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or (staging.memory.is_cuda and not tensor.is_pinned()):
            raise ValueError(
                f"{name} must be in pinned host memory for {staging.device} to reach it: pass its .cpu().pin_memory()"
            )
    check_adam(weight, master, exp_avg, exp_avg_sq, grad, gradient_factor, None)
    check_scalar("scale", scale, dtype=torch.float32, device=staging.device)
    step = launch_adam if staging.memory.is_cuda else adam
    # Where there is a master, that of a piece takes the place of None.
    update: Callable[..., None] = functools.partial(
        step, master=None, scalars=scalars, gradient_factor=gradient_factor, scale=scale
    )
    compute = staging.api.current_stream(staging.device)
    staging.started.record(compute)  # the copies wait for what the current stream wrote so far
    staging.started.wait(staging.upload)
    length = staging.slot_bytes // sum(tensor.element_size() for tensor in tensors.values()) // PADDING * PADDING
    for first in range(0, grad.numel(), length):
        parts = {name: tensor[first : first + length] for name, tensor in tensors.items()}
        slot, rooms, end = next(staging.slots), {}, 0
        for name, part in parts.items():
            rooms[name] = slot.memory[end : end + part.nbytes].view(part.dtype)
            end += part.nbytes
        with staging.on(staging.upload, after=slot.drained, done=slot.filled):
            for name, room in rooms.items():
                room.copy_(parts[name], non_blocking=True)
        with staging.on(compute, after=slot.filled, done=slot.updated):
            update(**rooms)
        with staging.on(staging.download, after=slot.updated, done=slot.drained):
            for name, room in rooms.items():
                if name != "grad":
                    parts[name].copy_(room, non_blocking=True)
    done: torch.cuda.Event = staging.api.Event()
    staging.started.wait(staging.download)
    done.record(staging.download)
    return done
