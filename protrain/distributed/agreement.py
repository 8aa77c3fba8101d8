"""Whether an action succeeded on all ranks, also one of threads beside the training."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from time import sleep
from typing import Any, TypeVar

import torch.distributed as dist

from protrain.common.errors import MisuseError
from protrain.distributed.links import STORE_IS_GONE
from protrain.distributed.processes import own_store
from protrain.distributed.ranks import Ranks

_TURN_S = 0.05

Value = TypeVar("Value")


class Aside:
    """The ranks of a training, seen from a thread that works beside it.

    All ranks must issue collectives in one order, in which the threads have no place. So their values travel through
    the store by which the processes have found each other.

    Args:
        ranks: that train.
        name: of what the threads do, the same on all ranks and never used before.
    """

    def __init__(self, ranks: Ranks, name: str) -> None:
        self.rank, self.size, self.several, self.on_node = ranks.rank, ranks.size, ranks.several, ranks.on_node
        self._ranks = ranks
        self._name = name
        self._exchanges = 0
        # It is held, as scripts end with destroy_process_group() while their last save is under way.
        self._store: Any = own_store() if ranks.several else None

    def all_values(self, value: Value, what: str = "") -> list[Value]:
        """The ``value`` of every rank, in rank order: any object that can be pickled. All must call it.

        The first rank returns last, as the store may be in its process, and leaves nothing in the store.

        Raises:
            MisuseError: the ranks of the training are out of step, so some may never come.
        """
        if not self.several:
            return [value]
        store, name = self._store, self._name
        self._exchanges += 1
        keys = {rank: f"protrain/{name}/{self._exchanges}/{rank}" for rank in range(self.size)}
        read = {rank: f"{key}/read" for rank, key in keys.items() if rank > 0}
        try:
            store.set(keys[self.rank], pickle.dumps(value))
            self._wait_for(keys)
            found = [pickle.loads(store.get(key)) for key in keys.values()]
            if self.rank > 0:
                store.set(read[self.rank], b"")
            else:
                self._wait_for(read)
                for key in (*keys.values(), *read.values()):
                    store.delete_key(key)
        except dist.DistError as error:
            raise MisuseError(f"{name} was given up, as {STORE_IS_GONE}: {error}") from None
        return found

    def _wait_for(self, keys: Mapping[int, str]) -> None:
        """Wait until the store has what each rank puts there, whose key is that of ``keys``."""
        for rank, key in keys.items():
            while True:
                is_gone = self._ranks.is_gone(rank)  # before the look at what it may have left
                if self._store.check([key]):
                    break
                if is_gone or self._ranks.is_out_of_step:
                    why = f"rank {rank} has ended" if is_gone else "the ranks are out of step"
                    raise MisuseError(f"{self._name} was given up, as {why}")
                sleep(_TURN_S)


@contextmanager
def raised_on_all(ranks: Ranks | Aside) -> Iterator[None]:
    """An error inside, on any rank, is raised on all of them when the last one has come to the end of the block.

    So no rank goes on alone with something that has failed on another. Each rank raises its own error if it has one,
    and otherwise that of the first rank that has.
    """
    if not ranks.several:
        yield
        return
    own: BaseException | None = None
    try:
        yield
    except BaseException as error:  # Ctrl-C, too: the others wait for this rank
        own = error
    errors = ranks.all_values(None if own is None else _sendable(own), "whether a rank has failed")
    if own is not None:
        raise own
    for rank, other in enumerate(errors):
        if other is not None:
            other.add_note(f"This error was raised on rank {rank}, and rank {ranks.rank} was told of it.")
            raise other


def _sendable(error: BaseException) -> Exception:
    """``error`` as an exception that another process can load and raise."""
    with suppress(Exception):  # the constructors of some exceptions need more arguments than they keep
        pickle.loads(pickle.dumps(error))
        if isinstance(error, Exception):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
