"""Keeps the profiles of models that are in memory. The key of a profile is a digest of all that it depends on.

A kept profile is used when nothing that it could depend on has changed: the modules, their plain attributes, the
source of all code that no installed package brought, parameters, batch, dtype, device, versions, and switches of torch.
The values of tensors, and attributes that are objects, are not compared. A model whose work depends on those must be
profiled anew with ``PROTRAIN_CACHE=0``.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.backends import cuda, cudnn

from protrain.common import batch as batches
from protrain.common.parameters import is_managed
from protrain.forward.compilation import CompiledForward
from protrain.forward.recomputation import autocast_dtype
from protrain.profiler.blocks import find_blocks
from protrain.profiler.kept_profiles import digest_of, kept, key_of
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.step_times import ALONE, MISSING, Together
from protrain.profiler.trace import profile

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.Size)


def cached_profile(
    model: nn.Module,
    example_batch: Any,
    *,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    dtype: torch.dtype,
    show: Callable[[str], None] | None = None,
    device_bytes: int | None = None,
    together: Together = ALONE,
) -> ModelProfile:
    """Return what ``protrain.profile`` would, from the cache if possible, and if all ranks find theirs.

    Profiles of GPUs are cached, and those that are counted on the meta device. On a CPU profiling is quick, and its
    times depend on what else the machine is doing at that moment.
    """
    how: dict[str, Any] = {"optimizer": optimizer, "device": device, "dtype": dtype}
    make = partial(profile, model, example_batch, show=show, device_bytes=device_bytes, together=together, **how)
    if device.type == "cpu":
        together.largest(MISSING, 1.0)
        return make()
    key = fingerprint(model, example_batch, **how)
    return kept("profiles", ModelProfile, key, make, lambda found: together.largest(MISSING, not found) == 0)


def fingerprint(
    model: nn.Module, example_batch: Any, *, optimizer: torch.optim.Optimizer, device: torch.device, dtype: torch.dtype
) -> str:
    """The digest of everything that a profile depends on."""
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    identity: dict[int, int] = {}  # tied parameters, and those of shared modules, get one number
    modules = []
    for path, module in model.named_modules(remove_duplicate=False):
        held = {
            name: (
                identity.setdefault(id(tensor), len(identity)),
                tuple(tensor.shape),
                str(tensor.dtype),
                tensor.requires_grad,
                groups.get(id(tensor)),
                {} if is_managed(tensor) else _quantisation(tensor),
            )
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        hooks = [_name(hook) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())]
        modules.append((path, _name(type(module)), _plain(vars(module)), hooks, held))
    blocks = find_blocks(model)
    facts = {
        "modules": modules,
        "code": _user_code(),
        "compiled": any(isinstance(model.get_submodule(path).forward, CompiledForward) for path in blocks),
        "config": getattr(getattr(model, "config", None), "to_json_string", str)(),
        "configs": _configs(model),
        "batch": batches.shapes(example_batch),
        "batch dtypes": [str(tensor.dtype) for _, tensor in batches.named_tensors(example_batch)],
        "dtype": str(dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cuda": torch.version.cuda,
        "settings": _settings(device.type),
    }
    return key_of(facts)


def _name(what: Any) -> str:
    named = what if hasattr(what, "__qualname__") else type(what)
    return f"{named.__module__}.{named.__qualname__}"


def _plain(attributes: Mapping[str, Any]) -> dict[str, str]:
    """The attributes that have a plain form: sizes, probabilities, names, collections, frozen dataclasses."""

    def form(value: Any) -> str | None:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, tuple | list) and all(isinstance(part, _PLAIN) for part in value):
            return repr(value)
        if getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False):
            return repr(value)  # a configuration, such as that of float8 products
        return getattr(value, "__qualname__", None)  # an activation function

    found = {name: form(value) for name, value in attributes.items() if name not in ("_parameters", "_buffers")}
    return {name: value for name, value in found.items() if value is not None}


def _configs(model: nn.Module) -> list[dict[str, str]]:
    """The attributes of all configurations of modules, as that of the model leaves out how attention is computed."""
    held = [vars(module).get("config") for module in model.modules()]
    configs = {id(config): config for config in held if hasattr(config, "__dict__")}
    return [_plain(vars(config)) for config in configs.values()]


def _quantisation(tensor: torch.Tensor) -> dict[str, str]:
    """How ``tensor`` is quantised. What is None is left out, as a first forward may move tensors elsewhere."""
    return _plain({name: value for name, value in vars(tensor).items() if value is not None})


def _user_code() -> str:
    """A digest of every loaded source file that no installed package brought. An edited model is another model."""
    installed = tuple({*sysconfig.get_paths().values(), sys.base_prefix, str(Path(torch.__file__).parent.parent)})
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return digest_of(Path(file) for file in files if file.endswith(".py") and not file.startswith(installed))


def _settings(device_type: str) -> list[Any]:
    """The switches of torch that decide which kernels run, and in which types: whether autocast is on, for example."""
    cast_to = autocast_dtype(device_type)
    return [
        str(cast_to),
        cast_to is not None and torch.is_autocast_cache_enabled(),
        str(torch.get_default_dtype()),
        cuda.matmul.fp32_precision,  # torch.get_float32_matmul_precision() fails once transformers has set it
        torch.are_deterministic_algorithms_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cudnn.benchmark,
    ]
