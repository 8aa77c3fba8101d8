"""The notes that ranks have of their collectives, and where those of two ranks differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

REMEDY = "All ranks must make the same calls in the same order, and have equally many batches"

NoteOf: TypeAlias = tuple[str, int]  # what a collective is for, and its bytes


def by_number(notes: Iterable[Sequence[Any]]) -> dict[int, NoteOf]:
    """``notes``, each of a number, what and bytes, by number."""
    return {number: (what, size_bytes) for number, what, size_bytes in notes}


def first_difference(notes: Mapping[int, Mapping[int, NoteOf]]) -> str | None:
    """The first note that differs between ranks, in words. None: there is none among those that are known.

    Args:
        notes: by rank and number.
    """
    numbers = sorted({number for each in notes.values() for number in each})
    for number in numbers:
        ranks_of: dict[NoteOf, list[int]] = {}
        for rank in sorted(notes):
            if number in notes[rank]:
                ranks_of.setdefault(notes[rank][number], []).append(rank)
        if len(ranks_of) > 1:
            # Most ranks do what is right, or the first one does.
            (usual, most), *others = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0]))
            (other, few) = others[0]
            if usual[0] != other[0]:
                return f"{named(few)} came to {other[0]}, while {named(most)} came to {usual[0]}. {REMEDY}"
            return (
                f"{named(few)} came to {other[0]} with {other[1]:,} bytes, while {named(most)} had {usual[1]:,}. "
                "Build the same model and pass the same arguments in every process"
            )
    return None


def named(ranks: Sequence[int]) -> str:
    """``ranks`` in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]] + (["others"] if len(ranks) > 8 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
