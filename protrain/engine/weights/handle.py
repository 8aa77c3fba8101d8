"""What a managed parameter knows of the engine that holds its weight and its gradient, and a stand-in for ``.grad``.

A parameter asks the engine for its weight, for the state of its gradient and for the norm of it. Some attributes and
methods of a tensor need no values, so they are answered wherever its data is.

The stand-in for the gradient of a managed parameter, which lies in a chunk, has the metadata of the gradient, a norm,
and takes a factor. torch's own clipping asks for no more, wherever it was imported from:
``torch.nn.utils.clip_grad_norm_`` takes the norm of each gradient, makes one factor of them all and multiplies every
gradient by it. The squares of each gradient were summed on its way into the chunk, and the factor goes into the update.
Every other use raises an error that names the parameter and the remedy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.common.trees import tensors_in

Engine: TypeAlias = Any  # protrain.engine.engine.Engine, which imports all files that ask it


class Handle:
    """The link from a managed parameter to the engine.

    The reference to the engine is weak, and so is that of the gradient hooks. Python's garbage collector does not see
    through a tensor that C++ holds, and a model that the user drops must free its chunks.
    """

    def __init__(self, name: str, index: int, engine: Engine) -> None:
        self.name = name
        self.index = index
        self.gradient_proxy: Tensor | None = None  # made when .grad is read first, as torch's clipping reads it often
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> Engine:
        """The engine. MisuseError when model and optimizer are gone."""
        engine = self._engine()
        if engine is None:
            raise MisuseError(f"{self.name} belongs to a model that no longer exists: keep the model that was wrapped")
        return engine

    def gradient_ready(self, _: Tensor) -> None:
        """The engine's own hook on the parameter, called after all others: autograd has accumulated its gradient."""
        self.engine.gradient_ready(self.index)


_GETTERS = """
    shape dtype device requires_grad is_leaf ndim layout grad_fn is_cuda is_cpu is_meta is_sparse is_sparse_csr
    is_quantized is_mkldnn is_nested output_nr itemsize nbytes is_xla is_mps is_xpu is_vulkan is_ipu
    is_maia is_mtia retains_grad _backward_hooks _post_accumulate_grad_hooks _version
"""
_METHODS = """
    size numel nelement dim ndimension element_size is_floating_point is_complex is_signed get_device type
    __len__ is_shared is_inference
"""
# Operations that read shape, type and device of one argument but no values of it, by the position of that argument.
_PATTERNS = {
    0: """new_empty new_zeros new_ones new_full new_tensor new_empty_strided""",
    1: """expand_as view_as reshape_as type_as to""",
}
_LIKE = "empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
METADATA: frozenset[Any] = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _GETTERS.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        *(torch.is_floating_point, torch.numel, torch.is_complex),
    )
)
# Attributes that describe a parameter's place in a graph, wherever its values are.
_AUTOGRAD = "requires_grad is_leaf grad_fn retains_grad output_nr _version _backward_hooks _post_accumulate_grad_hooks"
AUTOGRAD = frozenset([getattr(torch.Tensor, name).__get__ for name in _AUTOGRAD.split()])
LAYOUT = frozenset({torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.storage_offset})


def on_itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """What ``func`` returns for its arguments as they are, whatever their classes."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def as_contiguous(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """What ``func``, one of LAYOUT, returns for a contiguous tensor of the shape and type of ``tensor``."""
    return func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args, **kwargs)


# What changes a parameter itself, wherever its values are.
HOOKS = frozenset(
    {
        torch.Tensor.register_hook,
        torch.Tensor.requires_grad_,
        torch.Tensor.detach_,  # it freezes a parameter, as requires_grad_(False) does
        torch.Tensor.register_post_accumulate_grad_hook,
        *(
            getattr(torch.Tensor, name).__set__
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "requires_grad")
        ),
    }
)
PATTERNS: dict[Any, int] = {
    **{getattr(torch.Tensor, name): at for at, names in _PATTERNS.items() for name in names.split()},
    **{getattr(torch, name): 0 for name in _LIKE.split()},
}


_DATA: Any = Tensor.data


def describe(tensor: Any, **_: Any) -> str:
    """``repr`` of a parameter, or of what stands for its gradient."""
    name = vars(tensor).get("protrain_name") or tensor.protrain_handle.name
    with torch._C.DisableTorchFunctionSubclass():
        return f"{type(tensor).__name__}({name}, {tuple(tensor.shape)}, {tensor.dtype})"


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
            return on_itself(func, args, kwargs)
        if func in LAYOUT:
            return as_contiguous(func, *args, **(kwargs or {}))
        if func in _HANDLED:
            done = _HANDLED[func](*args, **(kwargs or {}))
            if done is not NotImplemented:
                return done
        handle = next(each for each in tensors_in((args, kwargs)) if isinstance(each, GradientProxy)).protrain_handle
        ranks = "It is that of all ranks already, so leave out what would add or average it over them. "
        raise MisuseError(
            f"the gradient of {handle.name} is kept in ProTrain's chunks, not in .grad, and cannot be used here "
            f"({getattr(func, '__name__', func)}). {ranks if handle.engine.memory.ranks.several else ''}Its 2-norm can "
            "be read, and all gradients can be multiplied by one factor, as torch.nn.utils.clip_grad_norm_ does. Use "
            "optimizer.zero_grad() to clear it, optimizer.backward(loss) in place of torch.amp.GradScaler, and "
            "parameter.register_post_accumulate_grad_hook to see or change it, or parameter.register_hook where a step "
            "has several backward() calls"
        )

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
