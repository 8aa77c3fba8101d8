"""AdamW by the GPU on states that live in host memory: the formula and the bits of ``adam``.

Two ways, for the caller to pick:

zero copy  One kernel reads and writes pinned host memory over the link, with few programs, each of which takes one
           block of parameters after another: enough to fill the link, and most of the GPU stays free. No device memory,
           no copies, one launch.
copies     The states go through an ``AdamStaging`` area of the device, a piece at a time, two or more pieces in turn:
           copied in on one stream, updated on another, copied out on a third, all at once. Copy engines move large
           pieces faster than kernels do, and take no multiprocessor.

Bytes over the link a parameter, bf16 weight, remainder, momentum and variance on the host, gradient on the device: 12
in and 12 out, at the same time, or 8 and 8 with moments in bf16. Weight and gradient may lie on either side; a weight
on the device saves 2 each way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from protrain_kernels.adam import BLOCK, adam, adam_arguments, adam_block, check_adam, launch_adam
from protrain_kernels.adam_types import AdamScalars
from protrain_kernels.checks import LAUNCH_OPTIONS, PADDING, check_scalar
from protrain_kernels.launch import launch

# A block is 14 KB of reads; 64 of them in flight cover the latency of a 64 GB/s link several times.
ZERO_COPY_PROGRAMS = 64
_ALIGNMENT_BYTES = 256  # of a slot of the staging area
_MOST_BYTES = 18  # a parameter: a float16 weight with everything else in float32


@triton.jit(do_not_specialize_on_alignment=["scale"])
def streamed_adam_kernel(
    weight: tl.tensor,
    master: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    grad: tl.tensor,
    scale: tl.tensor,
    numel: tl.tensor,
    decay: tl.tensor,
    l2: tl.tensor,
    beta1: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    inv_sqrt_bias_correction2: tl.tensor,
    eps: tl.tensor,
    step_size: tl.tensor,
    step: tl.tensor,
    SPLIT: tl.constexpr,
    OWN_MASTER: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_L2: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Every program updates the blocks whose turn is its own."""
    block = tl.program_id(0).to(tl.int64)
    while block * BLOCK < numel:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        adam_block(
            weight,
            master,
            exp_avg,
            exp_avg_sq,
            grad,
            scale,
            offsets,
            offsets < numel,
            decay,
            l2,
            beta1,
            one_minus_beta1,
            beta2,
            one_minus_beta2,
            inv_sqrt_bias_correction2,
            eps,
            step_size,
            step,
            SPLIT,
            OWN_MASTER,
            HAS_SCALE,
            HAS_L2,
        )
        block += tl.num_programs(0)


def launch_zero_copy(
    tensors: Sequence[torch.Tensor],
    numel: int,
    floats: Sequence[float],
    constants: tuple[bool | int, ...],
    *,
    programs: int,
    device: torch.device,
) -> None:
    """Launch the Triton kernel of the zero-copy way on what ``adam_arguments`` returned."""
    launch(
        streamed_adam_kernel,
        min(programs, -(-numel // BLOCK)),
        tensors,
        numel,
        floats,
        constants,
        LAUNCH_OPTIONS,
        device_index=device.index if device.type == "cuda" else -1,
        on_host=[index for index, tensor in enumerate(tensors) if not tensor.is_cuda],
    )


class AdamStaging:
    """Device memory, streams and events through which ``streamed_adam`` moves states; made once, used by many calls.

    Keep it until the last call's event is reached: its memory belongs to the stream that was current when it was made.

    Args:
        device: where the updates run.
        size_bytes: device memory to take. Pieces of 8 to 64 MiB a tensor reach the full rate of a copy engine.
        slots: pieces in flight: at least 2 for copies to overlap.
        upload: stream of the copies to the device; made when None.
        download: stream of the copies to the host; made when None.

    Raises:
        ValueError: the size leaves no room for 128 parameters a slot, or there are no slots.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        size_bytes: int = 128 << 20,
        slots: int = 2,
        upload: torch.cuda.Stream | None = None,
        download: torch.cuda.Stream | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, not {slots}")
        self.slot_bytes = size_bytes // slots // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        if self.slot_bytes < PADDING * _MOST_BYTES:
            raise ValueError(
                f"size_bytes is {size_bytes}: {slots} slots need {slots * PADDING * _MOST_BYTES} to hold anything"
            )
        self.device = device
        self.slots = slots
        self.memory = torch.empty(slots * self.slot_bytes, dtype=torch.uint8, device=device)
        self.on_gpu = device.type == "cuda"
        self.upload: Any = torch.cuda.Stream(device) if self.on_gpu and upload is None else upload
        self.download: Any = torch.cuda.Stream(device) if self.on_gpu and download is None else download
        self.started: Any = torch.cuda.Event() if self.on_gpu else None
        self._slots = [self._slot(index) for index in range(slots)]
        self._turn = 0

    def _slot(self, index: int) -> Slot:
        memory = self.memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]
        if not self.on_gpu:
            return Slot(memory, None, None, None)
        slot = Slot(memory, torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event())
        # The memory may have been another tensor's on the current stream until now.
        slot.drained.record(torch.cuda.current_stream(self.device))
        return slot

    def piece_elements(self, tensors: Iterable[torch.Tensor]) -> int:
        """How many parameters of ``tensors`` a slot holds."""
        return self.slot_bytes // sum(tensor.element_size() for tensor in tensors) // PADDING * PADDING

    def next_slot(self) -> Slot:
        """The slot whose turn it is."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        return slot


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one piece, and the events of its way; None on the CPU, where everything happens in order."""

    memory: torch.Tensor
    filled: Any
    updated: Any
    drained: Any

    def carve(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Room for a copy of each of ``parts``, whose lengths are multiples of 128."""
        found, start = [], 0
        for part in parts:
            found.append(self.memory[start : start + part.nbytes].view(part.dtype))
            start += part.nbytes
        return found


@contextlib.contextmanager
def _on(stream: Any, *, after: Any, done: Any) -> Iterator[None]:
    """Work of a stream that starts after one event and is followed by another."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        yield
        done.record(stream)


def run_pieces(
    staging: AdamStaging,
    tensors: dict[str, torch.Tensor],  # by the names of adam's arguments
    update: Callable[..., None],  # takes them by name
) -> torch.cuda.Event | None:
    """Stream checked tensors through ``staging`` and ``update`` each piece. Returns the event after the last copy."""
    compute = torch.cuda.current_stream(staging.device) if staging.on_gpu else None
    if compute is not None:
        staging.started.record(compute)  # what the current stream wrote so far is there to be copied
        staging.upload.wait_event(staging.started)
    away = [name for name, tensor in tensors.items() if _is_away(tensor, staging)]
    numel = tensors["grad"].numel()
    step = staging.piece_elements([tensors[name] for name in away]) if away else numel
    for first in range(0, numel, step):
        parts = {name: tensor[first : first + step] for name, tensor in tensors.items()}
        slot = staging.next_slot()
        rooms = dict(zip(away, slot.carve([parts[name] for name in away]), strict=True))
        with _on(staging.upload, after=slot.drained, done=slot.filled):
            for name, room in rooms.items():
                room.copy_(parts[name], non_blocking=True)
        with _on(compute, after=slot.filled, done=slot.updated):
            update(**(parts | rooms))
        with _on(staging.download, after=slot.updated, done=slot.drained):
            for name, room in rooms.items():
                if name != "grad":
                    parts[name].copy_(room, non_blocking=True)
    if compute is None:
        return None
    done = torch.cuda.Event()
    staging.download.wait_event(staging.started)
    done.record(staging.download)
    return done


def _is_away(tensor: torch.Tensor, staging: AdamStaging) -> bool:
    """Whether a tensor must be copied; on the CPU all are, as if the device were elsewhere."""
    return not tensor.is_cuda or not staging.on_gpu


def streamed_adam(
    weight: torch.Tensor,  # [n] bfloat16, float16 or float32
    master: torch.Tensor | None,  # [n] int16, float32 or None
    exp_avg: torch.Tensor,  # [n] float32 or bfloat16
    exp_avg_sq: torch.Tensor,  # [n] of the same type
    grad: torch.Tensor,  # [n] the weight's type or float32
    scalars: AdamScalars,
    *,
    scale: torch.Tensor | None = None,  # one float32 on the device
    staging: AdamStaging | None = None,
    programs: int = ZERO_COPY_PROGRAMS,
    device: torch.device | None = None,
) -> torch.cuda.Event | None:
    """One Adam step by the GPU on tensors in pinned host memory; see the module.

    The work is queued behind what the current stream of the device holds. States that another call updates may be used
    again, by whichever side, once that call's event is reached.

    Args:
        weight: as ``adam`` takes it, like master, exp_avg, exp_avg_sq and grad, each of which lies on the device or in
            pinned host memory.
        master: see weight.
        exp_avg: see weight.
        exp_avg_sq: see weight.
        grad: see weight; unchanged.
        scalars: this step's constants.
        scale: multiplies the gradient.
        staging: copies the states through it when given; None lets the kernel reach into host memory.
        programs: of the zero-copy kernel: more fill a faster link, fewer leave more of the GPU to others.
        device: where the update runs; the staging's, the gradient's or else the current GPU when None. On the CPU,
            where there is none, ``adam`` does the work.

    Returns:
        An event that is reached when everything is where it belongs; None on the CPU, where it is already.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length, or isn't pinned.
    """
    where = _device_of(staging, grad, device)
    check_streamed(weight, master, exp_avg, exp_avg_sq, grad, scale, where)
    if programs < 1:
        raise ValueError(f"programs must be at least 1, not {programs}")
    if staging is not None:
        given = {"weight": weight, "master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
        update = functools.partial(launch_adam if staging.on_gpu else adam, scalars=scalars, scale=scale)
        update = update if master is not None else functools.partial(update, master=None)
        return run_pieces(staging, {name: tensor for name, tensor in given.items() if tensor is not None}, update)
    if where.type == "cpu":
        adam(weight, master, exp_avg, exp_avg_sq, grad, scalars, scale=scale)
        return None
    if weight.numel():
        arguments = adam_arguments(weight, master, exp_avg, exp_avg_sq, grad, scalars, scale)
        launch_zero_copy(*arguments, programs=programs, device=where)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(where))
    return done


def _device_of(staging: AdamStaging | None, grad: torch.Tensor, device: torch.device | None) -> torch.device:
    if staging is not None:
        return staging.memory.device
    if device is not None and (device.type == "cpu" or device.index is not None):
        return device
    if grad.is_cuda:
        return grad.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def check_streamed(
    weight: torch.Tensor,
    master: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scale: torch.Tensor | None,
    device: torch.device,
) -> None:
    """ValueError unless ``streamed_adam`` can take these tensors."""
    named = {"weight": weight, "master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    for name, tensor in named.items():
        if tensor is None or tensor.device == device:
            continue
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}, and must be on {device} or in pinned host memory")
        if not tensor.is_pinned():
            raise ValueError(f"{name} must be in pinned host memory for {device} to reach it: pass its .pin_memory()")
    check_adam(weight, master, exp_avg, exp_avg_sq, grad, None, anywhere=True)
    check_scalar("scale", scale, dtype=torch.float32, device=device)
