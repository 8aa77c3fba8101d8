"""What ``flatten`` and ``unflatten`` prepare once for tensors of given shapes at given places of a chunk.

[Note: plans] On a GPU a plan holds two small tables on the device: which tensor each program works on, and each
tensor's layout. A call then writes the tensors' addresses where the kernel reads them (see [Note: addresses] in
launch.py) and launches once, whatever the number of tensors: no allocation, no copy, no synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protrain_kernels import host_adam
from protrain_kernels.checks import (
    FLOATS,
    PADDING,
    PROGRAM_ELEMENTS,
    TILE_CONSTANTS,
    TILE_OPTIONS,
    check_aligned,
    check_scalar,
    check_vector,
    padded,
    tiles,
)
from protrain_kernels.flatten_kernels import (
    BF16,
    FP16,
    FP32,
    MIXED,
    flatten_kernel,
    flatten_reference,
    unflatten_kernel,
    unflatten_reference,
)
from protrain_kernels.launch import launch, put_addresses
from protrain_kernels.strided import collapsed, is_dense, overlaps_itself, row_of

TYPE_CODES = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
_WIDE = 1 << 31  # positions that 32 bits don't count
_ADDRESSES = (2,)  # which of the kernels' tensors holds addresses
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def layout_of(tensor: torch.Tensor) -> Layout:
    """What a plan depends on: shape, stride, type and device."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class FlattenPlan:
    """Places of tensors in a chunk, prepared for ``flatten`` and ``unflatten`` in one launch each.

    Args:
        tensors: of the shapes, strides, types and device of those that come later; their values aren't read.
        offsets: where each starts in the chunk, in elements: multiples of 128, without overlap.
        partial_offsets: where each one's partial sums of squares start; None where none are wanted.

    Raises:
        ValueError: a tensor has the wrong type or device, or an offset can't be.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int],
        partial_offsets: Sequence[int] | None = None,
    ) -> None:
        starts = [0] * len(tensors) if partial_offsets is None else list(partial_offsets)
        if not len(tensors) == len(offsets) == len(starts):
            raise ValueError(
                f"{len(tensors)} tensors need as many offsets and partial_offsets, not {len(offsets)} and {len(starts)}"
            )
        if not tensors:
            raise ValueError("a plan needs at least one tensor: there is nothing to flatten")
        self.layouts = [layout_of(tensor) for tensor in tensors]
        self.device = tensors[0].device
        self.offsets = list(offsets)
        self.partial_offsets = None if partial_offsets is None else starts
        self._numels = [tensor.numel() for tensor in tensors]
        self._check(tensors)
        self.chunk_elements = max(
            (offset + padded(n) for offset, n in zip(offsets, self._numels, strict=True)), default=0
        )
        self.partial_elements = max(
            (start + tiles(n) for start, n in zip(starts, self._numels, strict=True)), default=0
        )
        self._nests = [
            not tensor.numel() or not overlaps_itself(*collapsed(tensor.shape, tensor.stride())) for tensor in tensors
        ]
        self._constants, self._tensor_of, self._rows = self._tables(starts)
        self._programs = self._tensor_of.numel()
        self._device_index = self._tensor_of.get_device()

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            name = f"tensors[{index}]"
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device}, tensors[0] on {self.device}: move it there")
            if tensor.dtype not in FLOATS:
                allowed = " or ".join(str(dtype) for dtype in FLOATS)
                raise ValueError(f"{name} must be {allowed}, not {tensor.dtype}: cast it first")
            if self.offsets[index] % PADDING or self.offsets[index] < 0:
                raise ValueError(f"offsets[{index}] is {self.offsets[index]}: it must be a multiple of {PADDING}")
            if self.partial_offsets is not None and self.partial_offsets[index] < 0:
                raise ValueError(f"partial_offsets[{index}] is {self.partial_offsets[index]}: it must be at least 0")
        end = 0
        for offset, numel, index in sorted(zip(self.offsets, self._numels, range(len(tensors)), strict=True)):
            if numel and offset < end:
                raise ValueError(
                    f"offsets[{index}] is {offset}, where another tensor reaches to {end}: leave each room for "
                    f"its elements padded to a multiple of {PADDING}"
                )
            end = max(end, offset + padded(numel))

    def _tables(self, starts: list[int]) -> tuple[tuple[int, int, bool], torch.Tensor, torch.Tensor]:
        """(type, dimensions and width of positions for the kernel, tensor of each program, rows)."""
        shapes = [collapsed(shape, stride) for shape, stride, _, _ in self.layouts]
        strided = [sizes for sizes, strides in shapes if not is_dense(sizes, strides)]
        # Rounded up, so that few variants compile.
        dims = 1 << (max(map(len, strided)) - 1).bit_length() if strided else 0
        codes = {TYPE_CODES[dtype] for _, _, dtype, _ in self.layouts}
        program, programs, rows = 0, [], []
        for index, ((sizes, strides), numel) in enumerate(zip(shapes, self._numels, strict=True)):
            dense = is_dense(sizes, strides)
            code = TYPE_CODES[self.layouts[index][2]]
            row = [numel, self.offsets[index], starts[index], program, code, int(dense)]
            rows.append(row + (row_of(sizes, strides, dims) if dims else []))
            count = -(-numel // PROGRAM_ELEMENTS)
            programs.append(count)
            program += count
        tensor_of = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(programs))
        constants = (codes.pop() if len(codes) == 1 else MIXED, dims, bool(strided) and max(self._numels) >= _WIDE)
        return constants, tensor_of.to(self.device), torch.tensor(rows, dtype=torch.int64).to(self.device)

    def flatten(
        self,
        tensors: Sequence[torch.Tensor],
        chunk: torch.Tensor,
        partials: torch.Tensor | None = None,
        *,
        accumulate: bool = False,
        scale: torch.Tensor | None = None,
        nonfinite: torch.Tensor | None = None,
        threads: int = 0,
    ) -> None:
        """Write tensors into their places of a chunk; see ``protrain_kernels.flatten``.

        Raises:
            ValueError: a tensor isn't like the one the plan was made for, or another argument is wrong.
        """
        self._check_layouts(tensors)
        self.flatten_planned(
            tensors, chunk, partials, accumulate=accumulate, scale=scale, nonfinite=nonfinite, threads=threads
        )

    def unflatten(
        self, chunk: torch.Tensor, tensors: Sequence[torch.Tensor], *, scale: torch.Tensor | None = None
    ) -> None:
        """Write a chunk's pieces back into tensors; see ``protrain_kernels.unflatten``.

        Raises:
            ValueError: a tensor isn't like the one the plan was made for, or another argument is wrong.
        """
        self._check_layouts(tensors)
        self.unflatten_planned(chunk, tensors, scale=scale)

    def _check_layouts(self, tensors: Sequence[torch.Tensor]) -> None:
        if [layout_of(tensor) for tensor in tensors] == self.layouts:
            return
        if len(tensors) != len(self.layouts):
            raise ValueError(f"the plan is for {len(self.layouts)} tensors, not {len(tensors)}: make another")
        for index, (tensor, layout) in enumerate(zip(tensors, self.layouts, strict=True)):
            if layout_of(tensor) != layout:
                names = ("shape", "stride", "type", "device")
                pairs = zip(names, layout_of(tensor), layout, strict=True)
                what = ", ".join(f"{name} {found} and not {own}" for name, found, own in pairs if found != own)
                raise ValueError(f"tensors[{index}] isn't what the plan was made for: {what}; make another plan")

    def _check_chunk(self, chunk: torch.Tensor, scale: torch.Tensor | None) -> None:
        check_vector("chunk", chunk, dtypes=FLOATS, device=self.device)
        check_aligned("chunk", chunk)
        check_scalar("scale", scale, dtype=torch.float32, device=self.device)
        if chunk.numel() < self.chunk_elements:
            for index, (offset, numel) in enumerate(zip(self.offsets, self._numels, strict=True)):
                if offset + padded(numel) > chunk.numel():
                    raise ValueError(
                        f"offsets[{index}] is {offset}: it must be a multiple of {PADDING} that leaves room for "
                        f"{padded(numel)} of the chunk's {chunk.numel()} elements"
                    )

    def _check_partials(self, partials: torch.Tensor | None) -> None:
        if partials is None:
            return
        check_vector("partials", partials, dtypes=(torch.float32,), device=self.device)
        if self.partial_offsets is None:
            raise ValueError("the plan has no partial_offsets, so it takes no partials: make it with them")
        if partials.numel() < self.partial_elements:
            for index, (start, numel) in enumerate(zip(self.partial_offsets, self._numels, strict=True)):
                if start + tiles(numel) > partials.numel():
                    raise ValueError(
                        f"partial_offsets[{index}] is {start}: it must leave room for "
                        f"{tiles(numel)} of {partials.numel()} partials"
                    )

    def flatten_planned(
        self,
        tensors: Sequence[torch.Tensor],
        chunk: torch.Tensor,
        partials: torch.Tensor | None,
        *,
        accumulate: bool,
        scale: torch.Tensor | None,
        nonfinite: torch.Tensor | None,
        threads: int,
    ) -> None:
        """``flatten`` for tensors that are known to be like the plan's."""
        self._check_chunk(chunk, scale)
        self._check_partials(partials)
        check_scalar("nonfinite", nonfinite, dtype=torch.int32, device=self.device)
        if accumulate and chunk.dtype != torch.float32:
            raise ValueError(f"values accumulate in a float32 chunk, not {chunk.dtype}: make the chunk float32")
        if chunk.is_cuda:
            self.launch_flatten(tensors, chunk, partials, accumulate=accumulate, scale=scale, nonfinite=nonfinite)
            return
        for index, (tensor, offset, numel) in enumerate(zip(tensors, self.offsets, self._numels, strict=True)):
            if numel == 0:
                continue
            start = 0 if self.partial_offsets is None else self.partial_offsets[index]
            own = None if partials is None else partials[start : start + tiles(numel)]
            target = chunk[offset : offset + padded(numel)]
            if not host_adam.host_flatten(
                tensor.contiguous(),
                target,
                own,
                accumulate=accumulate,
                scale=scale,
                nonfinite=nonfinite,
                threads=threads,
            ):
                flatten_reference(
                    [tensor], target, [0], own, [0], accumulate=accumulate, scale=scale, nonfinite=nonfinite
                )

    def unflatten_planned(
        self, chunk: torch.Tensor, tensors: Sequence[torch.Tensor], *, scale: torch.Tensor | None
    ) -> None:
        """``unflatten`` for tensors that are known to be like the plan's."""
        self._check_chunk(chunk, scale)
        if not all(self._nests):
            index = self._nests.index(False)
            raise ValueError(f"elements of tensors[{index}] share memory, so they can't be written: make it contiguous")
        if chunk.is_cuda:
            self.launch_unflatten(chunk, tensors, scale=scale)
            return
        unflatten_reference(chunk, tensors, self.offsets, scale=scale)

    def launch_flatten(
        self,
        tensors: Sequence[torch.Tensor],
        chunk: torch.Tensor,
        partials: torch.Tensor | None,
        *,
        accumulate: bool = False,
        scale: torch.Tensor | None = None,
        nonfinite: torch.Tensor | None = None,
    ) -> None:
        """Launch the Triton kernel of ``flatten`` on checked tensors."""
        chosen = (accumulate, scale is not None, partials is not None, nonfinite is not None)
        factor = chunk if scale is None else scale
        sums, flag = chunk if partials is None else partials, chunk if nonfinite is None else nonfinite
        self._launch(flatten_kernel, tensors, (chunk, sums, factor, flag), chosen)

    def launch_unflatten(
        self, chunk: torch.Tensor, tensors: Sequence[torch.Tensor], *, scale: torch.Tensor | None = None
    ) -> None:
        """Launch the Triton kernel of ``unflatten`` on checked tensors."""
        self._launch(unflatten_kernel, tensors, (chunk, chunk if scale is None else scale), (scale is not None,))

    def _launch(
        self,
        kernel: object,
        tensors: Sequence[torch.Tensor],
        others: tuple[torch.Tensor, ...],
        chosen: tuple[bool, ...],
    ) -> None:
        if not self._programs:
            return
        memory, slot = put_addresses(self._device_index, [*map(torch.Tensor.data_ptr, tensors)])
        launch(
            kernel,
            self._programs,
            (self._tensor_of, self._rows, memory, *others),
            slot,
            (),
            (*self._constants, *chosen, *TILE_CONSTANTS),
            TILE_OPTIONS,
            device_index=self._device_index,
            on_host=_ADDRESSES,
        )
