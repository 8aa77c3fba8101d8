"""What blocks are given, and until when others hold it than the checkpoints that recompute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from protrain.common.trees import map_leaves
from protrain.profiler.operations import storage_key


class GivenInputs:
    """Tells inputs that a model still holds, in a list of hidden states say, from those that checkpoints alone keep.

    While the step is measured a checkpoint keeps one tensor of its own for each that it is given. So a storage that
    more tensors share than were given is held by somebody else too.
    """

    def __init__(self) -> None:
        self._given: Counter[StorageWeakRef] = Counter()  # tensors of a storage, in all calls so far
        self._held: list[tuple[int, list[StorageWeakRef], dict[StorageWeakRef, int]]] = []  # by call, of the last look
        self._itself = 0  # users of a storage that are no tensors: what Python has for it
        alone = torch.empty(1)
        self._itself = self._users(storage_key(alone)) - 1

    def add(self, stretch: int, tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
        """A block is given ``tensors`` in its forward, which is the stretch of that index.

        Returns those that others hold for longer, each with the first stretch in which they do not. It is filled in as
        the step goes on.
        """
        until: dict[StorageWeakRef, int] = {}
        computed: dict[StorageWeakRef, None] = {}
        for tensor in tensors:
            key = storage_key(tensor)
            self._given[key] += 1
            if tensor.grad_fn is not None:
                computed[key] = None
        self._held.append((stretch, list(computed), until))
        return until

    def look(self, stretch: int, *, returned: bool = False) -> set[StorageWeakRef]:
        """Note what others hold now, as the stretch of that index begins, or as the model has ``returned`` in it.

        Returns that, of the calls before.
        """
        found: set[StorageWeakRef] = set()
        calls, self._held = self._held, []
        for call, keys, until in calls:
            held = keys
            if returned or stretch > call + 1:  # or whoever called the block has not gone on yet
                held = [key for key in keys if self._users(key) > self._given[key]]
                until.update(dict.fromkeys(held, stretch + 1))
                found.update(held)
            if held:
                self._held.append((call, held, until))
        return found

    def _users(self, key: StorageWeakRef) -> int:
        return torch._C._storage_Use_Count(key.cdata) - self._itself


class _Place(int):
    """Stands for the tensor of that number."""


def _take(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` with places for its tensors, which are added to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return tuple(_take(each, tensors) for each in value) if type(value) is tuple else value


def _put(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    return tuple(_put(each, tensors) for each in value) if type(value) is tuple else value


def run_checkpointed(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``forward`` under a checkpoint, which saves tensors among ``kwargs`` and in tuples as it does those of ``args``.

    It would hold them as they are otherwise, and be no user of its own. Lists, dictionaries and objects go through
    whole, as forward may change them. Run again, forward gets copies of what they were when it was called.
    """
    given: list[Tensor] = []
    places = _take(args, given), {name: _take(value, given) for name, value in kwargs.items()}
    kept = map_leaves(_itself, places)
    runs = [places]  # the first, which is given the caller's own

    def run(*tensors: Tensor) -> Any:
        args, kwargs = runs.pop() if runs else map_leaves(_itself, kept)
        return forward(*_put(args, tensors), **{name: _put(value, tensors) for name, value in kwargs.items()})

    return checkpoint(run, *given, use_reentrant=False)


def _itself(leaf: Any) -> Any:
    return leaf
