"""The inputs of blocks, and how long the model itself holds them in addition to the checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from protrain.common.trees import map_leaves
from protrain.profiler.storages import storage_key


class BlockInputs:
    """Tells inputs that only checkpoints keep from inputs that the model holds too, as in a list of hidden states.

    While the step is measured, a checkpoint keeps one tensor object for each tensor that it was given. So if more
    tensors share a storage than blocks were given, something else holds that storage too.
    """

    def __init__(self) -> None:
        self._given: Counter[StorageWeakRef] = Counter()  # how many tensors of each storage blocks were given so far
        # one entry per call: its segment, the storages that others held at the last look, and the result of add()
        self._held: list[tuple[int, list[StorageWeakRef], dict[StorageWeakRef, int]]] = []
        self._itself = 0  # the references to a storage that Python itself has
        alone = torch.empty(1)
        self._itself = self._users(storage_key(alone)) - 1

    def add(self, segment: int, tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
        """Note that a block's forward, which is the segment of index ``segment``, was given ``tensors``.

        Returns:
            The inputs that others hold for longer, each with the index of the first segment in which they no longer do.
            It is filled in while the step goes on.
        """
        until: dict[StorageWeakRef, int] = {}
        computed: dict[StorageWeakRef, None] = {}
        for tensor in tensors:
            key = storage_key(tensor)
            self._given[key] += 1
            if tensor.grad_fn is not None:
                computed[key] = None
        self._held.append((segment, list(computed), until))
        return until

    def look(self, segment: int, *, returned: bool = False) -> set[StorageWeakRef]:
        """Note which inputs others hold at the start of ``segment``, or once the model has ``returned`` in it.

        Returns:
            The storages that they hold, of inputs of earlier calls.
        """
        found: set[StorageWeakRef] = set()
        calls, self._held = self._held, []
        for call, keys, until in calls:
            held = keys
            if returned or segment > call + 1:  # otherwise the block's caller is still running the same call
                held = [key for key in keys if self._users(key) > self._given[key]]
                until.update(dict.fromkeys(held, segment + 1))
                found.update(held)
            if held:
                self._held.append((call, held, until))
        return found

    def _users(self, key: StorageWeakRef) -> int:
        return torch._C._storage_Use_Count(key.cdata) - self._itself


def run_checkpointed(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``forward`` under a checkpoint that saves the tensors in ``kwargs`` and in tuples like those in ``args``.

    ``torch.utils.checkpoint`` alone would keep the caller's own tensor objects of these, and so would not count as one
    more user of their storages. Lists, dictionaries and objects are passed through whole, as forward may change them.
    The recomputation gets copies of what they were at the call.
    """
    leaves, spec = tree_flatten((args, tuple(kwargs.values())), is_leaf=lambda part: type(part) is not tuple)
    names, is_tensor = list(kwargs), [isinstance(leaf, Tensor) for leaf in leaves]
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    kept = map_leaves(_itself, others)
    runs = [others]  # the first run is given the caller's own objects

    def run(*tensors: Tensor) -> Any:
        parts = iter(tensors), iter(runs.pop() if runs else map_leaves(_itself, kept))
        args, values = tree_unflatten([next(parts[0 if tensor else 1]) for tensor in is_tensor], spec)
        return forward(*args, **dict(zip(names, values, strict=True)))

    return checkpoint(run, *(leaf for leaf in leaves if isinstance(leaf, Tensor)), use_reentrant=False)


def _itself(leaf: Any) -> Any:
    return leaf
