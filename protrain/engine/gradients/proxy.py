"""A stand-in for ``.grad`` of a managed parameter whose gradient lies in a chunk.

It has the metadata of the gradient, a norm, and takes a factor. torch's own clipping asks for no more, wherever it was
imported from: ``torch.nn.utils.clip_grad_norm_`` takes the norm of each gradient, makes one factor of them all and
multiplies every gradient by it. The squares of each gradient were summed on its way into the chunk, and the factor goes
into the update. Every other use raises an error that names the parameter and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.common.trees import tensors_in
from protrain.engine.weights.handle import Handle
from protrain.engine.weights.metadata import LAYOUT, METADATA, as_contiguous

_DATA: Any = Tensor.data


def describe(tensor: Any, **_: Any) -> str:
    """``repr`` of a parameter, or of what stands for its gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return f"{type(tensor).__name__}({tensor.protrain_handle.name}, {tuple(tensor.shape)}, {tensor.dtype})"


class GradientProxy(Tensor):
    """A tensor without data that stands for the gradient of one parameter. It has its shape, type and device."""

    protrain_handle: Handle

    @classmethod
    def of(cls, handle: Handle, shape: torch.Size) -> GradientProxy:
        """The stand-in for the gradient of the parameter with ``handle``: always the same one."""
        proxy = handle.gradient_proxy
        if not isinstance(proxy, cls):
            with torch._C.DisableTorchFunctionSubclass():
                proxy = handle.engine.bindings.placeholder.expand(shape).as_subclass(cls)
            proxy.protrain_handle = handle
            handle.gradient_proxy = proxy
        return proxy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions for metadata and norms, take factors, and raise MisuseError for anything else."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in LAYOUT:
            return as_contiguous(func, *args, **(kwargs or {}))
        if func in _HANDLED:
            done = _HANDLED[func](*args, **(kwargs or {}))
            if done is not NotImplemented:
                return done
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, GradientProxy):
                handle = tensor.protrain_handle
                ranks = "It is that of all ranks already, so leave out what would add or average it over them. "
                raise MisuseError(
                    f"the gradient of {handle.name} is kept in ProTrain's chunks, not in .grad, and cannot be used "
                    f"here ({getattr(func, '__name__', func)}). {ranks if handle.engine.memory.ranks.several else ''}"
                    "Its 2-norm can be read, and all gradients can be multiplied by one factor, as "
                    "torch.nn.utils.clip_grad_norm_ does. Use optimizer.zero_grad() to clear it, "
                    "optimizer.backward(loss) in place of torch.amp.GradScaler, and "
                    "parameter.register_post_accumulate_grad_hook to see or change it, or parameter.register_hook "
                    "where a step has several backward() calls"
                )
        raise AssertionError("a gradient proxy was dispatched without being an argument")

    __repr__: Any = describe


def _norm(
    tensor: Any, order: Any = 2.0, *args: Any, p: Any = None, ord: Any = None, dtype: Any = None, **options: Any
) -> Any:
    order = p if p is not None else ord if ord is not None else order
    more = any(value is not None and value is not False for value in (*args, *options.values()))  # dim, keepdim, out
    if not isinstance(tensor, GradientProxy) or order not in (2, "fro", None) or more:
        return NotImplemented
    handle = tensor.protrain_handle
    norm = handle.engine.clipping_for("the norm of a gradient", handle.index).gradient_norm(handle.index)
    return norm if dtype is None else norm.to(dtype)


def _matrix_norm(tensor: Any, order: Any = None, *args: Any, ord: Any = None, **options: Any) -> Any:
    """``torch.linalg.norm``: its order 2 is the largest singular value of a matrix, and "fro" is for matrices only."""
    order = order if ord is None else ord
    known = order is None or (order == 2 and tensor.dim() <= 1) or (order == "fro" and tensor.dim() == 2)
    return _norm(tensor, None, *args, **options) if known else NotImplemented


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def _multiplied(tensor: Any, other: Any) -> Any:
    if not isinstance(tensor, GradientProxy) or not _is_factor(other):
        return NotImplemented
    handle = tensor.protrain_handle
    handle.engine.clipping_for("to multiply a gradient", handle.index).multiply_gradient(handle.index, other)
    return tensor


def _norms(tensors: Iterable[Tensor], order: Any = 2.0, *, ord: Any = None, dtype: torch.dtype | None = None) -> Any:
    order = order if ord is None else ord
    found = [
        (_norm if isinstance(tensor, GradientProxy) else torch.linalg.vector_norm)(tensor, order, dtype=dtype)
        for tensor in tensors
    ]
    return NotImplemented if any(norm is NotImplemented for norm in found) else found


def _all_multiplied(tensors: Iterable[Tensor], other: Any) -> Any:
    if not _is_factor(other):
        return NotImplemented
    for tensor in tensors:
        tensor.mul_(other)
    return None


_HANDLED: dict[Any, Callable[..., Any]] = {
    # Scripts write parameter.grad.detach().data.norm(2).
    Tensor.detach: lambda tensor: tensor,
    _DATA.__get__: lambda tensor, *_: tensor,
    torch.linalg.vector_norm: _norm,
    torch.linalg.norm: _matrix_norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch._foreach_norm: _norms,
    Tensor.mul_: _multiplied,
    Tensor.__imul__: _multiplied,
    torch._foreach_mul_: _all_multiplied,
}
