"""What a forward computes, moves and holds: flops of products and attention, bytes of the rest, and storages.

[Note: attention calls] Each attention call of a block is timed alone, with random values of the same shapes. Timing it
inside the traced block would need a dispatch mode, whose own overhead distorts the times of short kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.operator_schemas import normalize_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from protrain.common.parameters import made_of
from protrain.common.trees import tensors_in
from protrain.forward.dispatch import for_backward, is_attention
from protrain.profiler.step_times import elapsed_ms, finish, time_stamp

_CUDA_GRAIN_BYTES = 512  # CUDA's caching allocator rounds every allocation up to a multiple of this


def memory_in(tree: Any) -> list[Tensor]:
    """The plain tensors that all tensors in ``tree`` consist of. Each of them has a storage."""
    return [part for tensor in tensors_in(tree) for part in made_of(tensor).values()]


def storage_key(tensor: Tensor) -> StorageWeakRef:
    """An identifier for the storage of the plain ``tensor``.

    It is valid as long as the storage lives, and does not keep it alive.
    """
    return StorageWeakRef(tensor.untyped_storage())


def allocated_bytes(tensor: Tensor) -> int:
    """The bytes that the storage of ``tensor`` occupies on its device."""
    size = tensor.untyped_storage().nbytes()
    return -(-size // _CUDA_GRAIN_BYTES) * _CUDA_GRAIN_BYTES if tensor.is_cuda else size


def storages_in(tree: Any) -> dict[StorageWeakRef, int]:
    """The storages of all tensors in ``tree``, each with the bytes that it occupies on its device."""
    return {storage_key(tensor): allocated_bytes(tensor) for tensor in memory_in(tree)}


_REPEATS = 3


@dataclass(frozen=True)
class _Described:
    """A tensor's shape, strides and type. Of integers also the values, which may say where sequences begin."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    values: tuple[Any, ...] = ()

    def filled(self, device: torch.device) -> Tensor:
        """Such a tensor, with random values if it is of floats. An expanded mask shares its memory as it did."""
        if not self.dtype.is_floating_point:
            return torch.tensor(self.values, dtype=self.dtype, device=device).view(self.shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        filled = self.dtype if self.dtype.itemsize > 1 else torch.float32  # torch cannot draw random 8-bit values
        values = torch.empty(max(0, span), dtype=filled, device=device).normal_().to(self.dtype)
        return values.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention operator. Equal calls take equally long, so each is timed once."""

    operator: Any
    leaves: tuple[Any, ...]  # the arguments, with a description in place of each tensor
    tree: TreeSpec
    output_bytes: int
    flops: int

    def __hash__(self) -> int:
        return hash((self.operator, self.output_bytes, self.flops))


def attention_call(operator: Any, args: Any, kwargs: Any, outputs: Any, *, flops: int) -> AttentionCall:
    """Record a call of ``operator`` with its arguments and outputs."""
    leaves, tree = tree_flatten((args, kwargs))
    output_bytes = sum(storages_in(outputs).values())
    return AttentionCall(operator, tuple(map(_described, leaves)), tree, output_bytes, flops)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    values = () if leaf.is_floating_point() or leaf.is_meta else tuple(leaf.flatten().tolist())
    return _Described(leaf.shape, leaf.stride(), leaf.dtype, values)


def measured_ms(call: AttentionCall, device: torch.device) -> float:
    """The time of ``call`` on ``device``, in milliseconds."""
    leaves = [leaf.filled(device) if isinstance(leaf, _Described) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.tree)
    times = []
    with torch.no_grad():
        call.operator(*args, **kwargs)
        for _ in range(_REPEATS):
            start = time_stamp(device)
            call.operator(*args, **kwargs)
            end = time_stamp(device)
            finish(device)
            times.append(elapsed_ms(start, end))
    return median(times)


_FOUR_BIT = "gemm_4bit"  # of bitsandbytes: activations [..., K] times a packed weight, whose own shape is (N, K)

_COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces


def are_wrappers(types: Iterable[type]) -> bool:
    """Whether tensors of ``types`` consist of others (nested, quantised).

    Operators on them run operators on those others. A mode that returns NotImplemented for the former sees the latter.
    """
    return any(map(is_traceable_wrapper_subclass_type, types))


class Operations(TorchDispatchMode):
    """Counts the flops of products, convolutions and attention, and the bytes that other operators read and write.

    ``traffic_bytes`` counts the other operators as if each ran alone. ``fused_bytes`` counts them as if a compiler
    fused them: they read each outside tensor once, and they write only what a product reads or what backward needs.
    Operators on tensors of other classes (nested, quantised) are counted as the operators that these run. Products of
    sparse tensors, and of nested ones of the older layout, are counted by their bytes, as moving takes their time.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.traffic_bytes = 0
        self.fused_bytes = 0
        self.collective = False  # whether one of the operators is a collective of torch.distributed
        # in the forward that runs, each with the storage that attention saves for its backward
        self.attention: list[tuple[StorageWeakRef, AttentionCall]] = []
        self.saved_attention: list[AttentionCall] = []  # in all forwards that ended, where autograd saved that storage
        # results of fused operators that were not written to memory yet
        self._unwritten: dict[StorageWeakRef, int] = {}
        self._read: set[StorageWeakRef] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and count what it computes and moves."""
        if are_wrappers(types):
            return NotImplemented
        kwargs = kwargs or {}
        self.collective |= getattr(func, "namespace", "") in _COLLECTIVES
        dense = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors_in((args, kwargs)))
        if dense and not is_product(func) and isinstance(func, OpOverload) and func._can_decompose():
            with self:  # tensors of other classes run whole what autograd would have split up, such as aten.linear
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        sources, targets = _bytes_by_storage((args, kwargs)), _bytes_by_storage(result)
        flops = _flops_of(func, args, kwargs, result) if dense else None
        if flops is not None:
            self.flops += flops
            self.write(sources)
        # a view makes no new storage and moves nothing
        elif made := {key: size for key, size in targets.items() if key not in sources}:
            self.traffic_bytes += sum(sources.values()) + sum(made.values())
            read = {key: size for key, size in sources.items() if key not in self._unwritten and key not in self._read}
            self.fused_bytes += sum(read.values())
            self._read |= read.keys()
            self._unwritten |= made
        if is_attention(func) and (sums := for_backward(result)) is not None:
            self.attention.append((storage_key(sums), attention_call(func, args, kwargs, result, flops=flops or 0)))
        return result

    def write(self, keys: Iterable[StorageWeakRef]) -> None:
        """Count the storages ``keys`` as written, because a product reads them or backward needs them."""
        self.fused_bytes += sum(self._unwritten.pop(key, 0) for key in keys)

    def forward_ends(self, saved: Collection[StorageWeakRef]) -> None:
        """End a forward of which autograd ``saved`` these storages. What runs next reads and writes anew."""
        self.write(saved)
        self.saved_attention += [call for key, call in self.attention if key in saved]
        self.attention.clear()
        self._unwritten.clear()
        self._read.clear()


def _bytes_by_storage(tree: Any) -> dict[StorageWeakRef, int]:
    """The bytes that an operator touches of each storage. A view may be of a part, or may repeat the same elements."""
    return {
        storage_key(tensor): min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
        for tensor in memory_in(tree)
    }


def is_product(func: Any) -> bool:
    """Whether ``func`` is a matrix product, a convolution or attention, which a compiler leaves to a library."""
    packet = getattr(func, "_overloadpacket", func)  # an operator that takes other operators has no packet
    return packet in flop_registry or packet.__name__.startswith(("_scaled_dot_product", _FOUR_BIT))


def _flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """The flops of a product, convolution or attention; None for any other operator."""
    if not is_product(func):
        return None
    packet = getattr(func, "_overloadpacket", func)
    if packet.__name__.startswith("_scaled_dot_product") and not packet.__name__.endswith("_backward"):
        given = normalize_function(func, args, kwargs, normalize_to_only_use_kwargs=True)
        return _attention_flops(args[0], args[1], args[2], causal=bool(given and given.kwargs.get("is_causal")))
    if packet.__name__ == _FOUR_BIT:
        activations, _, (outputs, _), *_ = args
        return 2 * activations.numel() * int(outputs)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> int:
    """The flops of both products of attention; a causal mask leaves half of them.

    The table of torch knows neither causal masks nor the kernel of the CPU.
    """
    whole = 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    return whole // 2 if causal else whole
