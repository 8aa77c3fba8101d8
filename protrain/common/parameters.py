"""Which parameters ProTrain manages and lets nobody move, and what the others consist of, which it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from protrain.common import dtypes
from protrain.common.errors import MisuseError
from protrain.common.trees import named_tensors

# The types in which weights can train, by name.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in dtypes.DTYPES}
# The methods that return what a sparse tensor consists of.
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
_MANAGED = frozenset(DTYPES.values())
_FINGERPRINT_BYTES = 4096  # whose 64-bit words are added up


def is_managed(parameter: Tensor) -> bool:
    """Whether ``parameter`` is cast to the training dtype and lives in a chunk.

    Its numbers must be the weights themselves. Four kinds of parameters are not managed and stay as they are: storage
    types such as fp8, whose values mean nothing without a separate scale; float64, which no master weight holds;
    tensors of another class (torchao's, a DTensor), which consist of more than numbers; and parameter classes with
    their own method ``to`` (those of bitsandbytes), which does more than copy.
    """
    kind = type(parameter)
    return parameter.dtype in _MANAGED and nn.Parameter in kind.__mro__ and kind.to is Tensor.to


def moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Move the unmanaged ``parameter`` to ``device`` with its own method ``to``.

    The result keeps the attributes that ``to`` did not move itself.
    """
    new = parameter.to(device)
    found = new if isinstance(new, nn.Parameter) else nn.Parameter(new, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        vars(found).setdefault(name, value)
    return found


def made_of(tensor: Tensor, name: str = "") -> dict[str, Tensor]:
    """The plain tensors that make up ``tensor``, under dotted names that begin with ``name``.

    For example, a quantised tensor of torchao consists of numbers, scales and zero points, a jagged nested tensor of
    values and offsets, and a sparse one of indices and values.
    """
    split = None if is_plain(tensor) else split_up(tensor)
    if split is None:
        return {name: tensor}
    parts: dict[str, Tensor] = {}
    for attribute, part in split[0].items():
        parts |= made_of(part, f"{name}.{attribute}")
    return parts


def split_up(tensor: Tensor) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor]], Tensor]] | None:
    """The tensors that ``tensor`` consists of, and a function that makes such a tensor of others in their place.

    It is None for a tensor that consists of itself alone, and for a nested one of the older layout, which has a storage
    but no shape. The function does not keep ``tensor``.
    """
    layout = tensor.layout
    if layout in _SPARSE_PARTS:
        shape = tensor.shape
        make: Any = torch.sparse_coo_tensor if layout is torch.sparse_coo else torch.sparse_compressed_tensor
        with torch.no_grad():
            parts = {name: getattr(tensor, name)() for name in _SPARSE_PARTS[layout]}
        if layout is not torch.sparse_coo:
            return parts, lambda parts: make(*parts.values(), shape, layout=layout)
        coalesced = tensor.is_coalesced()
        return parts, lambda parts: make(*parts.values(), shape, is_coalesced=coalesced)
    if is_traceable_wrapper_subclass(tensor):
        shape, stride = tensor.shape, tensor.stride()
        names, context = tensor.__tensor_flatten__()
        kind: Any = type(tensor)
        parts = {name: getattr(tensor, name) for name in names}
        # torch knows the lengths of nested tensors by the object that holds the offsets
        offsets = {name: part for name, part in parts.items() if layout is torch.jagged and name != "_values"}
        return parts, lambda parts: kind.__tensor_unflatten__(parts | offsets, context, shape, stride)
    return None


def is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of no other class, dense, and has one shape and memory of its own."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether both have one type, one shape and the same bytes.

    Values are not compared, because NaN is not equal to itself.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def fingerprint(value: Tensor) -> int:
    """A number that two dense tensors share only if they are equal, but for a chance of about 1 in 2**64."""
    data = value.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:  # a slice whose words begin elsewhere
        data = data.clone()
    whole = data.numel() // _FINGERPRINT_BYTES * _FINGERPRINT_BYTES
    sums = data[:whole].view(-1, _FINGERPRINT_BYTES).view(torch.int64).sum(1)
    places = torch.arange(1, sums.numel() + 1, device=sums.device) * 2 + 1
    rest = int.from_bytes(bytes(data[whole:].tolist()), "little")
    return hash((int((sums * places).sum()), rest, tuple(value.shape)))


def kept_beside(tensor: Tensor, name: str = "") -> dict[str, Tensor]:
    """The tensors in attributes of ``tensor``, such as scales of a quantised weight, under dotted names as above."""
    if is_traceable_wrapper_subclass(tensor):
        return {}
    found = {f"{name}.{inner}": part for inner, part in named_tensors(vars(tensor))}
    return {inner: part for inner, part in found.items() if part is not tensor}


def unmanaged_memory(model: nn.Module) -> list[Tensor]:
    """The plain tensors that hold the buffers of ``model`` and its unmanaged parameters."""
    parameters = (parameter for parameter in model.parameters() if not is_managed(parameter))
    return plain_tensors((*model.buffers(), *parameters))


def unmanaged_bytes(model: nn.Module, device: torch.device) -> int:
    """The bytes that the buffers of ``model`` and its unmanaged parameters take on ``device`` now."""
    storages = [tensor.untyped_storage() for tensor in unmanaged_memory(model) if tensor.device == device]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def plain_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The plain tensors that make up ``tensors`` and that lie in their attributes."""
    return [part for tensor in tensors for part in (*made_of(tensor).values(), *kept_beside(tensor).values())]


def refuse_moves(model: nn.Module, sample: Tensor) -> None:
    """Refuse what ``to``, ``half``, ``cuda``, ``share_memory`` and the like of ``model`` and its modules would do.

    A parameter that they replaced would leave its chunk. What leaves ``sample``, which has the device and the type of
    the parameters, where and as it is, does nothing.
    """
    for module in model.modules():
        vars(module)["_apply"] = partial(_refuse, module, sample)


def _refuse(module: nn.Module, sample: Tensor, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    moved = function(sample.clone())
    if (moved.dtype, moved.device) == (sample.dtype, sample.device):
        if moved.is_shared() and not sample.is_shared():  # torch calls all memory of a GPU shared
            raise MisuseError(
                "a wrapped model cannot share its memory with other processes, as its weights move in every step: "
                "give them model.state_dict()"
            )
        return module
    raise MisuseError(
        f"a wrapped model cannot be moved from {sample.device} in {sample.dtype} to {moved.device} in {moved.dtype}: "
        "pass device= and dtype= to protrain.wrap. Where the forward of the model itself converts a module, such as "
        "the router of a mixture of experts, build the model without it (config.router_dtype = "
        f"{str(sample.dtype).removeprefix('torch.')!r} of Switch Transformers and NLLB-MoE)"
    )
