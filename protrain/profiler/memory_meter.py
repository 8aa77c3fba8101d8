"""Counts the memory of a step other than managed weights: from the GPU's allocator, or by following storages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from protrain.forward.compilation import inside_graph
from protrain.forward.dispatch import RuntimeMode
from protrain.profiler.operations import are_wrappers, is_product, memory_in, storages_in


class StorageMeter(RuntimeMode):
    """Counts the bytes of live storages that operations return. It works on the CPU and on meta tensors.

    It does not see what a kernel allocates and frees inside one operation. Enter it around the code to be measured. It
    counts backward too, because the CPU and the meta device run it in the calling thread.

    In a graph that stands for compiled code, a storage counts only if it is still alive when a matrix product runs or
    the graph ends. What is made and freed in between never leaves a fused kernel.

    Tensors of other classes (nested, quantised) are counted as the plain tensors that they make and consist of.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive_bytes = 0
        self._peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._counts = True
        self._fused: dict[int, int] = {}  # the bytes of known storages that are not counted yet

    @property
    def alive_bytes(self) -> int:
        """The counted bytes that are not freed yet."""
        self._count_fused()
        return self._alive_bytes

    @property
    def peak_bytes(self) -> int:
        """The maximum of ``alive_bytes`` since ``reset_peak``."""
        self._count_fused()
        return self._peak_bytes

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never count the storages of ``tensors``."""
        for tensor in memory_in([*tensors]):
            self._remember(tensor.untyped_storage(), 0)

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors``, once each, until they are freed."""
        for tensor in memory_in([*tensors]):
            storage = tensor.untyped_storage()
            self._remember(storage, storage.nbytes())

    def hold(self, size_bytes: int) -> None:
        """Count ``size_bytes`` of ignored storages until the end."""
        self._count_fused()
        self._add(size_bytes)

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self._peak_bytes = self.alive_bytes

    @contextmanager
    def managed(self) -> Iterator[None]:
        """Never count the storages that the body makes. Those that it resizes are ignored ones."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and count what it returns."""
        if are_wrappers(types):
            return NotImplemented
        fused = inside_graph() and not is_product(func)
        if not fused:
            self._count_fused()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in memory_in(result):
            storage = tensor.untyped_storage()
            self._remember(storage, storage.nbytes() if self._counts else 0, fused=fused)
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
    """Counts with the caching allocator's statistics, less what was allocated before and what ``managed`` adds."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # without it there are no statistics to reset
        self._device = device
        # Garbage that holds tensors, such as that of a trace that ran out of memory, may be collected at any time. In
        # the middle of the step its memory would be taken for memory that the step frees.
        gc.collect()
        # bytes that were allocated before the step, and bytes of managed weights
        self._outside = torch.cuda.memory_allocated(device)
        self._peak = 0

    def __enter__(self) -> CudaMeter:
        self.reset_peak()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""

    @property
    def alive_bytes(self) -> int:
        """The bytes allocated now."""
        return torch.cuda.memory_allocated(self._device) - self._outside

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated since ``reset_peak``."""
        return max(self._peak, torch.cuda.max_memory_allocated(self._device) - self._outside)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: what was allocated before the meter is not counted."""

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count ``tensors``, which were allocated before the meter."""
        self._outside -= sum(storages_in([*tensors]).values())

    def hold(self, size_bytes: int) -> None:
        """Count ``size_bytes`` of managed weights until the end."""
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
