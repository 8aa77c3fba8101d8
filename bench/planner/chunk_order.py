"""Plans whose chunks lie in another order than the product's, to measure what its order is worth.

The product packs parameters in execution order, and the first chunks persist. A plan can say nothing else. So while a
benchmark makes and wraps such a plan, it replaces the one function that gives every parameter its place. All that
follows from the places stays as it is: predictions, fetches, buffers and updates.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

from protrain.planning import layout

_Placed = tuple[list[tuple[int, int]], list[int], list[bool]]


class ChunkOrder(enum.Enum):
    """Which chunk is the first one."""

    EXECUTION = "execution"  # as the product has it: the chunk that forward needs first
    LAST_PERSIST = "last persist"  # the last chunks in execution order come before all others, and so they persist
    DEFINITION = "definition"  # the chunk of the parameters that the model defines first


@contextmanager
def chunks_in(order: ChunkOrder, *, n_persist: int) -> Iterator[None]:
    """Layouts that the body makes have their chunks in ``order``, of plans with ``n_persist`` persistent chunks."""
    place = layout._place

    def last_persist(groups: Iterable[layout._Group], n_parameters: int, chunk_elements: int) -> _Placed:
        places, used, trainable = place(groups, n_parameters, chunk_elements)
        n_away = len(used) - n_persist
        turned = [*range(n_away, len(used)), *range(n_away)]  # by new index, the index in execution order
        return (
            [(turned.index(chunk), offset) for chunk, offset in places],
            [used[chunk] for chunk in turned],
            [trainable[chunk] for chunk in turned],
        )

    def by_definition(groups: Iterable[layout._Group], n_parameters: int, chunk_elements: int) -> _Placed:
        defined = sorted(
            (group for group in groups if group.members), key=lambda group: min(index for index, _ in group.members)
        )
        return place(defined, n_parameters, chunk_elements)

    other = {ChunkOrder.EXECUTION: place, ChunkOrder.LAST_PERSIST: last_persist, ChunkOrder.DEFINITION: by_definition}
    with mock.patch.object(layout, "_place", other[order]):
        yield
