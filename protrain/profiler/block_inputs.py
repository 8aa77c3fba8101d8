"""The inputs of blocks, and how long the model itself holds them in addition to the checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from protrain.forward.module_state import BlockModules
from protrain.forward.recomputation import Recomputation
from protrain.profiler.storages import memory_in, storage_key


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
            for part in memory_in(tensor):
                key = storage_key(part)
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


class CheckpointedCall(Recomputation):
    """A call of a block in the trace, which keeps its inputs and is recomputed in backward.

    It keeps a tensor object of its own for each tensor that the block was given, so that it counts as one more user of
    the storage. A block that changes its own inputs in place is recomputed with the changed ones: a plan may do without
    recomputing that block. ``around`` makes a further context for the second run.
    """

    def __init__(
        self,
        label: str,
        modules: BlockModules,
        device: torch.device,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(label, modules, device)
        self._around = around
        self.kept: Tensor | None = None  # takes the memory of what else a call keeps

    @override
    def as_given(self, leaf: Any) -> Any:
        return self.fresh_input(leaf) if isinstance(leaf, Tensor) else super().as_given(leaf)

    @override
    def around_second_run(self) -> AbstractContextManager[Any]:
        return self._around()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first run, after ``first_run_begins``."""
        with saved_tensors_hooks(self.count_saved, self.restored):
            output = self.function(*args, **kwargs)
        self.first_run_ends()
        return output
