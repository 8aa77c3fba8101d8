"""Attributes and methods of a tensor that need no values, so that they can be answered wherever its data is."""

from __future__ import annotations

from typing import Any

import torch

_GETTERS = """
    shape dtype device requires_grad is_leaf ndim layout grad_fn is_cuda is_cpu is_meta is_sparse is_sparse_csr
    is_quantized is_mkldnn is_nested output_nr names itemsize nbytes is_xla is_mps is_xpu is_hpu is_vulkan is_ipu
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


def _metadata() -> frozenset[Any]:
    found = [getattr(torch.Tensor, name).__get__ for name in _GETTERS.split() if hasattr(torch.Tensor, name)]
    found += [getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)]
    return frozenset([*found, torch.is_floating_point, torch.numel, torch.is_complex])


METADATA = _metadata()
# Attributes that describe a parameter's place in a graph, wherever its values are.
_AUTOGRAD = "requires_grad is_leaf grad_fn retains_grad output_nr _version _backward_hooks _post_accumulate_grad_hooks"
AUTOGRAD = frozenset([getattr(torch.Tensor, name).__get__ for name in _AUTOGRAD.split()])
LAYOUT = frozenset({torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.storage_offset})


def as_contiguous(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """What ``func``, one of LAYOUT, returns for a contiguous tensor of the shape and type of ``tensor``."""
    return func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args, **kwargs)


HOOKS = frozenset(
    {
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        *(getattr(torch.Tensor, name).__set__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
    }
)
PATTERNS: dict[Any, int] = {
    **{getattr(torch.Tensor, name): at for at, names in _PATTERNS.items() for name in names.split()},
    **{getattr(torch, name): 0 for name in _LIKE.split()},
}
