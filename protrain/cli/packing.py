"""Writes rows of tokens to the disk, in sequences of one length.

Rows are first written as they come. Without packing each is a sequence of its own then. With packing each goes, the
longest first, into the sequence with the least room that still holds it (best fit, decreasing). Only rows longer than a
sequence are cut. The same rows are always packed alike, and of a row nothing but its length is held in memory.
"""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protrain.cli.data import BEGINS, COUNTED, mapped, marks_file, tokens_file


class RowWriter:
    """Writes the rows of one part of a corpus."""

    def __init__(self, folder: Path, part: str, dtype: np.dtype[Any], *, sequence: int, packing: bool) -> None:
        self._packing = packing
        self._loose = [(folder / f"{part}.loose.bin", dtype), (folder / f"{part}.marks.loose.bin", np.dtype(np.uint8))]
        self._written = tokens_file(folder, part), marks_file(folder, part)
        self._sequence = sequence
        self._lengths = array("q")
        self._files = ExitStack()
        self._tokens, self._marks = (self._files.enter_context(path.open("wb")) for path, _ in self._loose)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def add(self, ids: NDArray[np.int64], counted: NDArray[np.bool_]) -> None:
        """Add a row. If it is longer than a sequence it is cut, and a part without a counted token is left out.

        The first token is not counted, as nothing before it in the sequence belongs to the row.
        """
        for first in range(0, len(ids), self._sequence):
            marks = counted[first : first + self._sequence].astype(np.uint8) * COUNTED
            marks[0] = BEGINS
            if (marks & COUNTED).any():
                self._tokens.write(ids[first : first + self._sequence].astype(self._loose[0][1]).tobytes())
                self._marks.write(marks.tobytes())
                self._lengths.append(len(marks))

    def finish(self, padding: int) -> None:
        """Write the sequences, filled up with the token ``padding``."""
        self._files.close()
        lengths = np.array(self._lengths, np.int64)
        belongs = pack(lengths, self._sequence) if self._packing else np.arange(len(lengths))
        order = np.argsort(belongs, kind="stable")
        starts = (np.cumsum(lengths) - lengths)[order]
        ends = starts + lengths[order]
        sequences = np.split(np.arange(len(order)), np.cumsum(np.bincount(belongs))[:-1]) if len(order) else []
        padding_marks = (BEGINS, 0) if self._packing else (0,)
        for (loose, dtype), path, fill in zip(self._loose, self._written, ((padding,), padding_marks), strict=True):
            source = mapped(loose, dtype)
            with path.open("wb") as file:
                for rows in sequences:
                    filled = np.concatenate([source[starts[row] : ends[row]] for row in rows])
                    rest = np.full(self._sequence - len(filled), fill[-1], dtype)
                    rest[:1] = fill[0]
                    file.write(filled.tobytes() + rest.tobytes())
            loose.unlink()


def pack(lengths: NDArray[np.int64], sequence: int) -> NDArray[np.int64]:
    """The number of the sequence that each row goes to, for rows of ``lengths``, none above ``sequence``."""
    belongs = np.empty(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(sequence + 1)]  # the sequences with so many tokens left
    rooms = 0  # bit r is set if a sequence has exactly r tokens left
    sequences = 0
    for row in np.argsort(-lengths, kind="stable"):
        length = int(lengths[row])
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1  # the least room that is enough
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, chosen = sequence, sequences
            sequences += 1
        belongs[row] = chosen
        with_room[room - length].append(chosen)
        rooms |= 1 << (room - length)
    return belongs
