"""What threads beside the training tell each other, one thread of every rank."""

from __future__ import annotations

import pickle
from time import sleep
from typing import Any, TypeVar

import torch.distributed as dist

from protrain.common.errors import MisuseError
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
        self.rank, self.size, self.several = ranks.rank, ranks.size, ranks.several
        self._ranks = ranks
        self._name = name
        self._exchanges = 0

    def all_values(self, value: Value, what: str = "") -> list[Value]:
        """The ``value`` of every rank, in rank order: any object that can be pickled. All must call it.

        The first rank returns last, as the store may be in its process, and leaves nothing in the store.

        Raises:
            MisuseError: the ranks of the training are out of step, so some may never come.
        """
        if not self.several:
            return [value]
        store: Any = dist.distributed_c10d._get_default_store()
        self._exchanges += 1
        keys = [f"protrain/{self._name}/{self._exchanges}/{rank}" for rank in range(self.size)]
        read = [f"{key}/read" for key in keys[1:]]
        store.set(keys[self.rank], pickle.dumps(value))
        self._wait_for(store, keys)
        found = [pickle.loads(store.get(key)) for key in keys]
        if self.rank > 0:
            store.set(read[self.rank - 1], b"")
        else:
            self._wait_for(store, read)
            for key in (*keys, *read):
                store.delete_key(key)
        return found

    def _wait_for(self, store: Any, keys: list[str]) -> None:
        while not store.check(keys):
            if self._ranks.is_out_of_step:
                raise MisuseError(f"{self._name} was given up, as the ranks are out of step")
            sleep(_TURN_S)
