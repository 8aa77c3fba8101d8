"""What ``flatten`` and ``unflatten`` prepare once for tensors of given shapes at given places of a chunk.

[Note: plans] On a GPU a plan holds two small tables on the device: one says which tensor each program works on, the
other describes each tensor. A call then writes the tensors' addresses where the kernel reads them (see
[Note: addresses] in launch.py) and launches once, whatever the number of tensors, without an allocation, a copy or a
synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protrain_kernels.checks import (
    FLOATS,
    PADDING,
    PROGRAM_ELEMENTS,
    TILE_CONSTANTS,
    TILE_OPTIONS,
    check_aligned,
    check_memory,
    check_vector,
    padded,
    tiles,
)
from protrain_kernels.flatten_kernels import flatten_kernel, unflatten_kernel
from protrain_kernels.launch import launch, put_addresses
from protrain_kernels.rounding import FP32, TYPE_CODES

_ADDRESSES = (2,)  # the index of the addresses among the kernels' tensors


class FlattenPlan:
    """Places of tensors in a chunk, prepared for ``flatten`` and ``unflatten`` in one launch each.

    Args:
        tensors: contiguous tensors of one type and device. The plan serves all tensors of the same shapes.
        offsets: where each tensor starts in the chunk, in elements: multiples of 128, without overlap.
        partial_offsets: where each tensor's partial sums of squares start; None where no partials are wanted.

    Raises:
        ValueError: a tensor has the wrong type, device or layout, or an offset is impossible.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], partial_offsets: Sequence[int] | None
    ) -> None:
        starts = [0] * len(tensors) if partial_offsets is None else list(partial_offsets)
        if not len(tensors) == len(offsets) == len(starts):
            raise ValueError(
                f"{len(tensors)} tensors need as many offsets and partial_offsets, not {len(offsets)} and {len(starts)}"
            )
        self.device = tensors[0].device
        self.offsets = list(offsets)
        self.starts = starts
        self.numels = [tensor.numel() for tensor in tensors]
        self._check_tensors(tensors)
        self._check_offsets()
        self._chunk_elements = max(o + padded(n) for o, n in zip(self.offsets, self.numels, strict=True))
        self._partial_elements = max(s + tiles(n) for s, n in zip(self.starts, self.numels, strict=True))
        self._type = TYPE_CODES[tensors[0].dtype]
        self._tensor_of, self.rows = self._tables()
        self._programs = self._tensor_of.numel()
        self._device_index = self._tensor_of.get_device()

    def _check_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            name = f"tensors[{index}]"
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device}, tensors[0] on {self.device}: move it there")
            check_memory(name, tensor)
            if tensor.dtype not in FLOATS:
                allowed = " or ".join(str(dtype) for dtype in FLOATS)
                raise ValueError(f"{name} must be {allowed}, not {tensor.dtype}: cast it first")
            if tensor.dtype != tensors[0].dtype:
                raise ValueError(f"{name} is {tensor.dtype}, tensors[0] {tensors[0].dtype}: cast it first")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous: pass {name}.contiguous()")

    def _check_offsets(self) -> None:
        for index, (offset, start) in enumerate(zip(self.offsets, self.starts, strict=True)):
            if offset % PADDING or offset < 0:
                raise ValueError(f"offsets[{index}] is {offset}: it must be a multiple of {PADDING}")
            if start < 0:
                raise ValueError(f"partial_offsets[{index}] is {start}: it must be at least 0")
        end = 0
        for offset, numel, index in sorted(zip(self.offsets, self.numels, range(len(self.numels)), strict=True)):
            if numel and offset < end:
                raise ValueError(
                    f"offsets[{index}] is {offset}, where another tensor reaches to {end}: leave each room for "
                    f"its elements padded to a multiple of {PADDING}"
                )
            end = max(end, offset + padded(numel))

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor of each program, and the row of each tensor."""
        program, programs, rows = 0, [], []
        for numel, offset, start in zip(self.numels, self.offsets, self.starts, strict=True):
            rows.append([numel, offset, start, program])
            programs.append(-(-numel // PROGRAM_ELEMENTS))
            program += programs[-1]
        tensor_of = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(programs))
        return tensor_of.to(self.device), torch.tensor(rows, dtype=torch.int64).to(self.device)

    def check(self, chunk: torch.Tensor, partials: torch.Tensor | None = None) -> None:
        """ValueError unless the chunk and the partials have the right type, device and layout, and enough room."""
        check_vector("chunk", chunk, dtypes=FLOATS, device=self.device)
        check_aligned("chunk", chunk)
        if chunk.numel() < self._chunk_elements:
            for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
                if offset + padded(numel) > chunk.numel():
                    raise ValueError(
                        f"offsets[{index}] is {offset}: it must be a multiple of {PADDING} that leaves room for "
                        f"{padded(numel)} of the chunk's {chunk.numel()} elements"
                    )
        if partials is None:
            return
        check_vector("partials", partials, dtypes=(torch.float32,), device=self.device)
        if partials.numel() < self._partial_elements:
            for index, (start, numel) in enumerate(zip(self.starts, self.numels, strict=True)):
                if start + tiles(numel) > partials.numel():
                    raise ValueError(
                        f"partial_offsets[{index}] is {start}: it must leave room for "
                        f"{tiles(numel)} of {partials.numel()} partials"
                    )

    def launch_flatten(
        self,
        tensors: Sequence[torch.Tensor],
        chunk: torch.Tensor,
        partials: torch.Tensor | None,
        *,
        accumulate: bool,
        weight_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Launch the Triton kernel of ``flatten`` on checked tensors."""
        sums = chunk if partials is None else partials  # the kernel reads no partials then
        rounded_to = FP32 if partials is None or chunk.dtype is not torch.float32 else TYPE_CODES[weight_dtype]
        self._launch(flatten_kernel, tensors, (chunk, sums), (accumulate, partials is not None, rounded_to))

    def launch_unflatten(self, chunk: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Launch the Triton kernel of ``unflatten`` on checked tensors."""
        self._launch(unflatten_kernel, tensors, (chunk,), ())

    def _launch(
        self,
        kernel: object,
        tensors: Sequence[torch.Tensor],
        others: tuple[torch.Tensor, ...],
        chosen: tuple[bool | int, ...],
    ) -> None:
        if not self._programs:
            return
        memory, slot = put_addresses(self._device_index, [*map(torch.Tensor.data_ptr, tensors)])
        launch(
            kernel,
            self._programs,
            (self._tensor_of, self.rows, memory, *others),
            slot,
            (),
            (self._type, *chosen, *TILE_CONSTANTS),
            TILE_OPTIONS,
            device_index=self._device_index,
            on_host=_ADDRESSES,
        )
