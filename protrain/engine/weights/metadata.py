"""What is true of a tensor wherever its data is: attributes and methods that need none of it."""

from __future__ import annotations

from typing import Any

import torch

_GETTERS = """
    shape dtype device requires_grad is_leaf ndim layout grad_fn is_cuda is_cpu is_meta is_sparse is_sparse_csr
    is_quantized is_mkldnn is_nested output_nr names itemsize nbytes is_xla is_mps is_xpu is_hpu is_vulkan is_ipu
    is_maia is_mtia retains_grad _backward_hooks _version
"""
_METHODS = """
    size numel nelement dim ndimension element_size is_floating_point is_complex is_signed get_device type
    __len__ is_contiguous is_shared is_inference
"""


def _metadata() -> frozenset[Any]:
    found = [getattr(torch.Tensor, name).__get__ for name in _GETTERS.split() if hasattr(torch.Tensor, name)]
    found += [getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)]
    return frozenset([*found, torch.is_floating_point, torch.numel, torch.is_complex])


METADATA = _metadata()
