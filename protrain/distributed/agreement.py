"""What ranks tell each other of an action: whether it succeeded on all, also in threads, and whether all are done."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from time import sleep
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from protrain.common.errors import MisuseError
from protrain.distributed.joining import own_store
from protrain.distributed.links import STORE_IS_GONE
from protrain.distributed.ranks import Ranks

_TURN_S = 0.05

Value = TypeVar("Value")


class StoreExchange:
    """Exchanges values between threads of all ranks, which work beside the training.

    All ranks must issue collectives in one order, in which these threads have no place. So their values travel through
    the store by which the processes have found each other.

    Args:
        ranks: that train.
        name: of what the threads do, the same on all ranks and never used before.
    """

    def __init__(self, ranks: Ranks, name: str) -> None:
        self.rank, self.size, self.several, self.on_node = ranks.rank, ranks.size, ranks.several, ranks.on_node
        self._watch: Any = ranks.watch if ranks.several else None
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
        self._exchanges += 1
        store, key = self._store, f"protrain/{self._name}/{self._exchanges}"
        try:
            store.set(f"{key}/{self.rank}", pickle.dumps(value))
            found = [pickle.loads(self._awaited_value(f"{key}/{rank}", rank)) for rank in range(self.size)]
            store.set(f"{key}/{self.rank}/read", b"")
            read = {rank: f"{key}/{rank}/read" for rank in range(self.size if self.rank == 0 else 0)}
            for rank, each in read.items():
                self._awaited_value(each, rank)
            for rank, each in read.items():
                store.delete_key(f"{key}/{rank}")
                store.delete_key(each)
        except dist.DistError as error:
            raise MisuseError(f"{self._name} was given up, as {STORE_IS_GONE}: {error}") from None
        return found

    def _awaited_value(self, key: str, rank: int) -> Any:
        """What ``rank`` puts into the store as ``key``, once it has done so."""
        while True:
            is_gone = rank != self.rank and self._watch.peers[rank].gone  # before the look at what it may have left
            if self._store.check([key]):
                return self._store.get(key)
            if is_gone or self._watch.decided is not None:
                why = f"rank {rank} has ended" if is_gone else "the ranks are out of step"
                raise MisuseError(f"{self._name} was given up, as {why}")
            sleep(_TURN_S)


@contextmanager
def raised_on_all(ranks: Ranks | StoreExchange) -> Iterator[None]:
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


def generate_together(model: nn.Module, ranks: Ranks) -> None:
    """Let ``generate()`` of ``model``, or of a model inside, call forward until all ranks have all their tokens.

    transformers does so with ``synced_gpus=True``, which is passed now in any case, because Trainer passes False. It
    would ask all processes of the default group whether they are done. Here it asks ``ranks``, with their watcher.
    """
    found: Iterable[Any] = model.modules() if ranks.several else ()
    for module in found:
        if hasattr(module, "_has_unfinished_sequences"):
            vars(module).update(
                generate=_synced(module.generate),
                _has_unfinished_sequences=functools.partial(_is_any_unfinished, ranks),
            )


def _synced(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def run(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **(kwargs | {"synced_gpus": True}))

    return run


def _is_any_unfinished(ranks: Ranks, this_peer_finished: bool, synced_gpus: bool, device: Any) -> bool:
    return not all(ranks.all_values(bool(this_peer_finished), "the end of generate()"))
