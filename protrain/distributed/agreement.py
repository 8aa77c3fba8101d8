"""Whether an action succeeded on all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from protrain.distributed.aside import Aside
from protrain.distributed.ranks import Ranks


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
    if isinstance(error, Exception):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # the constructors of some exceptions need more arguments than they keep
            pass
        else:
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
