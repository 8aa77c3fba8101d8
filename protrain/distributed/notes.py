"""The notes that ranks have of their collectives, and where those of two ranks differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

REMEDY = (
    "All ranks must make the same calls in the same order, and have equally many batches: only what is done with their "
    "results may stand under `if rank == 0`"
)


class NoteOf(NamedTuple):
    """What a rank notes of a collective."""

    what: str  # it is for
    size_bytes: int
    after: str = ""  # the error that this rank has caught since the note before


def by_number(notes: Iterable[Sequence[Any]]) -> dict[int, NoteOf]:
    """``notes``, each of a number and the fields of a note, by number."""
    return {number: NoteOf(*fields) for number, *fields in notes}


def first_difference(notes: Mapping[int, Mapping[int, NoteOf]]) -> str | None:
    """The first note that differs between ranks, in words. None: there is none among those that are known.

    Args:
        notes: by rank and number.
    """
    numbers = sorted({number for each in notes.values() for number in each})
    for number in numbers:
        ranks_of: dict[tuple[str, int], list[int]] = {}
        for rank in sorted(notes):
            if number in notes[rank]:
                note = notes[rank][number]
                ranks_of.setdefault((note.what, note.size_bytes), []).append(rank)
        if len(ranks_of) > 1:
            # Most ranks do what is right, or the first one does.
            (usual, most), *others = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0]))
            (other, few) = others[0]
            if usual[0] != other[0]:
                they, we = (
                    f"{named(ranks)} came to {max((said(notes[rank], number) for rank in ranks), key=len)}"
                    for ranks in (few, most)
                )
                return f"{they}, while {we}. {REMEDY}"
            return (
                f"{named(few)} came to {other[0]} with {other[1]:,} bytes, while {named(most)} had {usual[1]:,}. "
                "Build the same model and pass the same arguments in every process"
            )
    return None


def said(notes: Mapping[int, NoteOf], number: int) -> str:
    """What the note of this number is for, with an error that this rank has caught since it last came to the same."""
    if number not in notes:
        return "a later collective"
    what = notes[number].what
    for at in range(number, min(notes) - 1, -1):
        if at < number and notes[at].what == what:
            break
        if notes[at].after:
            return f"{what} (after {notes[at].after})"
    return what


def named(ranks: Sequence[int]) -> str:
    """``ranks`` in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]] + (["others"] if len(ranks) > 8 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
