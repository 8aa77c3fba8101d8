"""Batches and outputs: how a batch becomes the model's arguments, and which loss comes out.

An example batch is a mapping (the model is called with ``model(**batch)``) or a tuple (``model(*batch)``). Its tensors
may lie in nested containers and in objects; ``protrain.common.trees`` says in which. The trace and the engine both
treat inputs with the functions here.

A forward may write into its arguments. Some models, for example, take a dictionary of features and put their results
into it. The caller sees these writes, as in plain PyTorch, because an argument goes to the model as it is unless a
tensor in it must be moved or cast. In that case the model gets a new container, as it would from a training loop that
moves its own batches.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.trees import (
    copied_cache,
    is_cache,
    knows_to,
    map_leaves,
    named_tensors,
    replace_leaves,
    tensors_in,
)


def of_one(given: Any) -> Any:
    """``given``, or a tuple of it if it is a tensor or an object, which is then the model's one argument."""
    return given if given is None or isinstance(given, Mapping | tuple | list) else (given,)


def check(batch: Any) -> None:
    """Raise a ValueError unless ``batch`` is a mapping with text keys or a tuple, and holds tensors that are all dense.

    An object that holds tensors and cannot be copied raises its own error here, and not only where a plan copies it.
    """
    if not isinstance(batch, Mapping | tuple):
        raise ValueError(
            f"a batch must be a mapping (called as model(**batch)) or a tuple (model(*batch)), not "
            f"{type(batch).__name__}; pass tuple(batch), or for a single input a tuple of one: (input,)"
        )
    tensors = dict(named_tensors(batch))
    for name, tensor in tensors.items():
        # a tensor without a storage can neither be counted nor moved
        if tensor.is_nested or tensor.layout is not torch.strided:
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            remedy = "to_padded_tensor(...)" if tensor.is_nested else "to_dense()"
            raise ValueError(
                f"the batch's input {name} is a {layout} tensor, but models are profiled and run with dense tensors "
                f"only; pass what its {remedy} gives"
            )
    if not tensors:
        inputs = batch.values() if isinstance(batch, Mapping) else batch
        types = ", ".join(dict.fromkeys(type(value).__name__ for value in inputs)) or "nothing"
        raise ValueError(
            f"the batch holds no tensor, but {types}: pass the inputs that the training loop gives to the model, as "
            "tensors, or in tuples, lists, dicts, dataclasses or objects with a method to(device)"
        )
    map_leaves(lambda leaf: leaf, batch)


def shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in ``batch``. Nested tensors have dotted names, and positions are named "0", "1"."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(batch)}


def tokens(batch: Any) -> int:
    """The number of tokens: the elements of the first integer tensor, or else the first tensor's first dimension."""
    first: Tensor | None = None
    for _, tensor in named_tensors(batch):
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool:
            return tensor.numel()
        first = tensor if first is None else first
    assert first is not None
    return first.shape[0] if first.ndim else 1


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments with which ``batch`` calls the model."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch), {}


def of_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The batch that calls ``model`` as ``model(*args, **kwargs)`` does.

    Raises:
        ValueError: there are both kinds of arguments, and forward has no names for those by position.
    """
    if not kwargs:
        return args
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [name for name, taken in inspect.signature(model.forward).parameters.items() if taken.kind is kind]
    if len(names) < len(args):
        raise ValueError(
            f"the model was called with {len(args)} arguments by position beside others by name, and its forward has "
            f"names for {len(names)}: pass an example_batch to protrain.wrap"
        )
    return dict(zip(names, args, strict=False)) | kwargs


def growth(shape: tuple[int, ...], planned: tuple[int, ...], *, rows_first: bool) -> float:
    """How many times the memory of the ``planned`` shape an input of ``shape`` may need. It is at least 1.

    Memory grows with the elements, and that of attention with the square of the length of sequences. So more rows of
    shorter sequences need no more memory, and fewer rows of longer ones may. Any dimension is taken for a length,
    except the first one where it is known to be the rows (``rows_first``).
    """
    rank = max(len(shape), len(planned))
    pairs = zip((1,) * (rank - len(shape)) + shape, (1,) * (rank - len(planned)) + planned, strict=True)
    lengths = list(pairs)[1 if rows_first else 0 :]
    longer = math.prod(max(1.0, size / max(1, limit)) for size, limit in lengths)
    return longer * max(1.0, math.prod(shape) / max(1, math.prod(planned)))


def move(tree: Any, device: torch.device, moved: Callable[[Tensor], Tensor]) -> Any:
    """``tree`` with each tensor replaced by ``moved`` of it, which is on ``device``.

    An unchanged tree comes back itself.

    An object with a method ``to(device)`` is moved by calling that method on a copy of the object, because ``to`` often
    changes the object itself, and that is the caller's.
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


def fresh_copy(batch: Any) -> Any:
    """A copy of ``batch`` that forward may write to without changing ``batch``.

    Tensors, containers, objects and key/value caches are new. A tensor that occurs twice in the batch is one tensor in
    the copy. A tensor that requires a gradient does so in the copy, as a leaf.
    """
    copies: dict[int, Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            # The copy of a view holds as much memory as the view's storage, as it does in training.
            copies[id(tensor)] = copy.deepcopy(tensor.detach()).requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return own(leaf)
        return copied_cache(leaf, own) if is_cache(leaf) else leaf

    return map_leaves(copied, batch)


def cast_inputs(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """``args`` and ``kwargs`` with all their fp32 tensors cast to ``dtype``, as FSDP's cast_forward_inputs does.

    An argument without fp32 tensors is passed on as it is.
    """

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf

    return (
        tuple([replace_leaves(cast, argument) for argument in args]),
        {name: replace_leaves(cast, argument) for name, argument in kwargs.items()},
    )


def training_arguments(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs``, with ``use_cache=False`` added if ``model`` would otherwise keep key/value caches while training."""
    config = getattr(model, "config", None)
    # The attributes of a config may be configs of parts: of an encoder and a decoder, an image and a text model.
    parts = [config, *getattr(config, "__dict__", {}).values()]
    if "use_cache" in kwargs or not any(getattr(part, "use_cache", False) is True for part in parts):
        return kwargs
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {**kwargs, "use_cache": False} if "use_cache" in parameters or takes_any else kwargs


def loss_of(output: Any) -> Tensor:
    """The scalar to call ``backward`` on.

    ``output.loss``, ``output["loss"]`` or a scalar output is taken as it is. For any other output it is the sum of its
    scalars and, for every tensor that the scalars do not depend on, the mean of its log-softmax in fp32. That stands in
    for a cross entropy, at about its cost. Tensors without a gradient are left out.

    Raises:
        ValueError: nothing in ``output`` depends on a trainable parameter.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, Tensor):
        loss = output
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss.reshape(())
    tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
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
    """The nodes of the autograd graph that ``tensors`` depend on."""
    found: set[Any] = set()
    left = [tensor.grad_fn for tensor in tensors]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return found
