"""What torch.autocast does to operators on a device at this moment, and the same for meta tensors.

torch's own autocast has no rules for the meta device, and leaves its tensors as they are. They are cast here as those
of a GPU are, so that a step is counted as it will run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from protrain.common.trees import map_leaves, tensors_in


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type to which torch.autocast casts now, or None where it is off or does not exist."""
    kind = _kind(device_type)
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)


def autocast_of_now(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes a context in which torch.autocast does to operators what it does now."""
    kind = _kind(device_type)
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cache_enabled = torch.is_autocast_cache_enabled()

    def again() -> AbstractContextManager[Any]:
        # There is nearly always none, so this must be fast.
        if not (enabled or torch.is_autocast_enabled(kind)):
            return nullcontext()
        return torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)

    return again


def _kind(device_type: str) -> str:
    """The device whose autocast counts. The meta device stands for whichever a step is counted for."""
    if device_type != "meta":
        return device_type
    return "cuda" if torch.is_autocast_enabled("cuda") else "cpu"


# The names of functions, by the type in which torch.autocast runs them on a GPU: its own type, fp32, or the widest type
# among the arguments. See torch's page on automatic mixed precision.
_IN_OWN_TYPE = (
    "linear matmul __matmul__ __rmatmul__ mm bmm mv addr addmm addmv addbmm baddbmm chain_matmul "
    "multi_dot vecdot einsum prelu conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "conv_tbc convolution _convolution lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell multi_head_attention_forward scaled_dot_product_attention"
)
_IN_FP32 = (
    "acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2 logsumexp pow __pow__ __rpow__ __rdiv__ "
    "__rtruediv__ reciprocal rsqrt cumprod cumsum prod sum norm vector_norm matrix_norm dist pdist cdist renorm "
    "softmax log_softmax softmin softplus layer_norm group_norm cosine_similarity cross_entropy "
    "nll_loss nll_loss2d kl_div l1_loss mse_loss smooth_l1_loss huber_loss poisson_nll_loss "
    "soft_margin_loss multi_margin_loss multilabel_margin_loss margin_ranking_loss triplet_margin_loss "
    "hinge_embedding_loss cosine_embedding_loss binary_cross_entropy_with_logits normalize interpolate upsample"
)
_IN_WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot vdot"
_RULES = {
    name: rule
    for rule, names in (("own", _IN_OWN_TYPE), ("fp32", _IN_FP32), ("widest", _IN_WIDEST))
    for name in names.split()
}
if torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"):  # in torch 2.12 and later
    _RULES["rms_norm"] = "fp32"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class AutocastOnMeta(TorchFunctionMode):
    """Inside, functions are given meta tensors in the type in which torch.autocast would run them on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, with its arguments cast if autocast is on."""
        kwargs = kwargs or {}
        rule = _RULES.get(getattr(func, "__name__", "").removeprefix("linalg_"))
        own_type = autocast_dtype("meta") if rule else None
        if rule and own_type:
            wanted = _wanted(rule, own_type, (args, kwargs))
            args, kwargs = map_leaves(lambda leaf: leaf.to(wanted) if _is_cast(leaf) else leaf, (args, kwargs))
        return func(*args, **kwargs)


def _wanted(rule: str, own_type: torch.dtype, given: Any) -> torch.dtype:
    if rule == "own":
        return own_type
    types = {tensor.dtype for tensor in tensors_in(given) if _is_cast(tensor)}
    return types.pop() if rule == "widest" and len(types) == 1 else torch.float32


def _is_cast(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta and leaf.dtype in _FLOATS
