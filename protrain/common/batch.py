"""Batches and outputs: what goes into the model, on which device and in which dtype, and the loss that comes out.

An example batch is a mapping (the model is called with ``model(**batch)``) or a tuple (``model(*batch)``). Its tensors
may lie in nested containers and in objects: :mod:`protrain.common.trees` says in which. The trace and the engine treat
inputs the same way, through the functions here.

A forward may write into what it is given, as models do that take a dictionary of features and put their results into
it. The caller sees that, as in plain PyTorch: an argument goes to the model as it is, unless a tensor in it must go to
the device or be cast. Then the model gets a new container, as it would get one from a loop that moves its own batches.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.trees import knows_to, map_leaves, named_tensors, replace_leaves, tensors_in


def check(batch: Any) -> None:
    """ValueError unless ``batch`` is a mapping with text keys or a tuple, and holds tensors, all of them dense.

    It is one, too, where an object in it holds tensors and cannot be copied.
    """
    if not isinstance(batch, Mapping | tuple):
        raise ValueError(
            f"a batch must be a mapping (called as model(**batch)) or a tuple (model(*batch)), not "
            f"{type(batch).__name__}; for a single input pass a tuple of one: (input,)"
        )
    if isinstance(batch, Mapping):
        wrong = next((key for key in batch if not isinstance(key, str)), None)
        if wrong is not None:
            raise ValueError(
                f"a batch's keys are argument names of the model's forward and must be text, not {wrong!r}"
            )
    tensors = dict(named_tensors(batch))
    for name, tensor in tensors.items():
        if tensor.is_nested or tensor.layout is not torch.strided:  # one without a storage is neither counted nor moved
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            remedy = "to_padded_tensor(...)" if tensor.is_nested else "to_dense()"
            raise ValueError(
                f"the batch's input {name} is a {layout} tensor, and models are profiled and run with dense ones "
                f"alone; pass what its {remedy} gives"
            )
    if not tensors:
        inputs = batch.values() if isinstance(batch, Mapping) else batch
        types = ", ".join(dict.fromkeys(type(value).__name__ for value in inputs)) or "nothing"
        raise ValueError(
            f"the batch holds no tensor, but {types}: pass the inputs that the training loop gives to the model, as "
            "tensors, or in tuples, lists, dicts, dataclasses or objects with tensors as attributes"
        )
    map_leaves(lambda leaf: leaf, batch)


def shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in ``batch``; nested ones under dotted names, positions as "0", "1"."""
    check(batch)
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(batch)}


def tokens(batch: Any) -> int:
    """Elements of the first integer tensor in ``batch``; without one, the first dimension of the first tensor."""
    check(batch)
    first: Tensor | None = None
    for _, tensor in named_tensors(batch):
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool:
            return tensor.numel()
        first = tensor if first is None else first
    assert first is not None
    return first.shape[0] if first.ndim else 1


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model's forward for ``batch``."""
    check(batch)
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch), {}


def excess(shape: tuple[int, ...], planned: tuple[int, ...], *, rows_first: bool) -> str:
    """How an input of ``shape`` could need more memory than one of the ``planned`` shape; "" if in no way.

    More rows of shorter sequences need no more, but fewer rows of longer ones do: attention grows with the square. So
    no dimension may be longer except the first, and that one only where it is known to be the rows (``rows_first``).
    """
    if math.prod(shape) > math.prod(planned):
        return "larger"
    rank = max(len(shape), len(planned))
    pairs = zip((1,) * (rank - len(shape)) + shape, (1,) * (rank - len(planned)) + planned, strict=True)
    longer = [at for at, (size, limit) in enumerate(pairs) if size > limit and not (rows_first and at == 0)]
    return f"longer in dimension {longer[0] - rank + len(shape)}" if longer else ""


def to_device(tree: Any, device: torch.device) -> Any:
    """``tree`` with every tensor on ``device``, or itself where they all are there: nothing is copied without need."""
    return move(tree, device, lambda tensor: tensor.to(device))


def move(tree: Any, device: torch.device, moved: Callable[[Tensor], Tensor]) -> Any:
    """``tree`` with ``moved`` of every tensor, which is on ``device``; itself where no tensor is another one then.

    An object that has a method ``to(device)`` is moved by a call of that on a copy, as ``to`` often changes the object
    itself, the caller's.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return moved(leaf)
        if not knows_to(leaf):
            return leaf
        tensors = tensors_in(leaf)
        there = tensors and all(tensor.device == device for tensor in tensors)
        return leaf if there else copy.copy(leaf).to(device)

    return replace_leaves(one, tree, whole=knows_to)


def own_copy(batch: Any) -> Any:
    """``batch`` in tensors, containers and objects of its own, which forward may write to without changing ``batch``.

    A tensor that occurs twice does so in the copy. What requires a gradient does so there, as a leaf of its own.
    """
    copies: dict[int, Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = _cloned(leaf.detach()).requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return map_leaves(copied, batch)


def _cloned(tensor: Tensor) -> Tensor:
    """A copy of ``tensor``. That of a part of a larger tensor holds as much memory, as the part does in training."""
    if type(tensor) is not Tensor or tensor.is_meta or 0 in tensor.stride():
        return tensor.clone()
    size_bytes = tensor.untyped_storage().nbytes()
    if size_bytes == tensor.nbytes:
        return tensor.clone()
    memory = torch.empty(size_bytes, dtype=torch.uint8, device=tensor.device)  # of which no more than the part is used
    part = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    part.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return part.copy_(tensor)


def cast_inputs(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """``args`` and ``kwargs`` with their fp32 tensors in ``dtype``, nested ones too (FSDP's cast_forward_inputs).

    An argument that holds none is passed on as it is.
    """

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf

    return (
        tuple([replace_leaves(cast, argument) for argument in args]),
        {name: replace_leaves(cast, argument) for name, argument in kwargs.items()},
    )


def training_arguments(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` plus ``use_cache=False`` where ``model`` would otherwise keep key/value caches while training."""
    config = getattr(model, "config", None)
    parts = [
        config,
        *getattr(config, "__dict__", {}).values(),
    ]  # of an encoder and a decoder, an image and a text model
    if "use_cache" in kwargs or not any(getattr(part, "use_cache", False) is True for part in parts):
        return kwargs
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {**kwargs, "use_cache": False} if "use_cache" in parameters or takes_any else kwargs


def loss_of(output: Any) -> Tensor:
    """The scalar to call ``backward`` on.

    ``output.loss``, ``output["loss"]`` or a scalar output is taken as it is. Of any other output the sum of its scalars
    is taken, and of every tensor that they do not come from, as a loss comes from logits, a stand-in of about the cost
    of a cross entropy: the mean of the log-softmax in fp32. What has no gradient counts for nothing. ValueError when
    nothing in ``output`` depends on a trainable parameter.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, Tensor):
        loss = output
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss.reshape(())
    tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    tensors = [tensor for tensor in tensors if tensor.requires_grad]
    if not tensors:
        raise ValueError(
            "the model's output depends on no trainable parameter, so there is nothing to train; "
            "set requires_grad on the parameters to be trained and pass labels if the model computes its own loss"
        )
    scalars = [tensor for tensor in tensors if tensor.numel() == 1]
    used = _graph_of(scalars)
    others = [tensor for tensor in tensors if tensor.numel() != 1 and tensor.grad_fn not in used]
    parts = [tensor.float().reshape(()) for tensor in scalars]
    parts += [tensor.float().log_softmax(-1).mean() for tensor in others]
    return torch.stack(parts).sum()


def _graph_of(tensors: list[Tensor]) -> set[Any]:
    """The nodes that ``tensors`` come from."""
    found: set[Any] = set()
    left = [tensor.grad_fn for tensor in tensors]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return found
