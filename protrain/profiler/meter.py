"""Counts the memory that a step takes beside managed weights: by the GPU's allocator, or by following storages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from protrain.common.trees import tensors_in
from protrain.forward.compilation_on_meta import inside_graph
from protrain.forward.dispatch import RuntimeMode
from protrain.profiler.operations import is_product


class StorageMeter(RuntimeMode):
    """Bytes of the storages that live, seen as operations return them; works on the CPU and on meta tensors.

    What a kernel allocates and frees inside one operation is not seen. Enter it around the code to be measured;
    backward counts too, as those devices run it in the calling thread.

    Of a graph that stands for compiled code only what is there when a product runs, or the graph ends, counts: what is
    made and gone in between never leaves a fused kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive_bytes = 0
        self._peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._fused: dict[int, int] = {}  # bytes of those among them that are not counted yet

    @property
    def alive_bytes(self) -> int:
        """Of what is counted and was not freed."""
        self._count_fused()
        return self._alive_bytes

    @property
    def peak_bytes(self) -> int:
        """Most of it since :meth:`reset_peak`."""
        self._count_fused()
        return self._peak_bytes

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never count the storages of ``tensors``."""
        for tensor in tensors:
            self._remember(tensor.untyped_storage(), 0)

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors``, once each, until they are freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._remember(storage, storage.nbytes())

    def hold(self, size_bytes: int) -> None:
        """Count ``size_bytes`` of what is ignored until the end."""
        self._count_fused()
        self._add(size_bytes)

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self._peak_bytes = self.alive_bytes

    @contextmanager
    def managed(self) -> Iterator[None]:
        """Storages that change size in the body are ignored ones; nothing to do."""
        yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and count what it returns."""
        fused = inside_graph() and not is_product(func)
        if not fused:
            self._count_fused()
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            self._remember(storage, storage.nbytes(), fused=fused)
        return result

    def _remember(self, storage: torch.UntypedStorage, size: int, *, fused: bool = False) -> None:
        key = storage._cdata
        if key in self._known:
            return

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._known[key]
            if self._fused.pop(key, None) is None:
                self._alive_bytes -= size

        self._known[key] = weakref.ref(storage, freed)
        if fused:
            self._fused[key] = size
        else:
            self._add(size)

    def _count_fused(self) -> None:
        while self._fused:
            self._add(self._fused.popitem()[1])

    def _add(self, size: int) -> None:
        self._alive_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._alive_bytes)


class CudaMeter:
    """The caching allocator's statistics, less what was there before and what :meth:`managed` adds."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # there are no statistics to reset before
        self._device = device
        self._outside = torch.cuda.memory_allocated(device)  # before the step, and managed weights
        self._peak = 0

    def __enter__(self) -> CudaMeter:
        self.reset_peak()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""

    @property
    def alive_bytes(self) -> int:
        """Allocated now."""
        return torch.cuda.memory_allocated(self._device) - self._outside

    @property
    def peak_bytes(self) -> int:
        """Most allocated since :meth:`reset_peak`."""
        return max(self._peak, torch.cuda.max_memory_allocated(self._device) - self._outside)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: what was allocated before the meter is not counted."""

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count ``tensors``, which were allocated before the meter."""
        sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self._outside -= sum(-(-size // 512) * 512 for size in sizes.values())

    def hold(self, size_bytes: int) -> None:
        """Count ``size_bytes`` of what is managed until the end."""
        self._peak = self.peak_bytes
        self._outside -= size_bytes
        torch.cuda.reset_peak_memory_stats(self._device)

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak = self.alive_bytes

    @contextmanager
    def managed(self) -> Iterator[None]:
        """Leave out what the body allocates or frees."""
        self._peak = self.peak_bytes
        before = torch.cuda.memory_allocated(self._device)
        yield
        self._outside += torch.cuda.memory_allocated(self._device) - before
        torch.cuda.reset_peak_memory_stats(self._device)


Meter = StorageMeter | CudaMeter
