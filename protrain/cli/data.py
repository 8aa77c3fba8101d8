"""The tokens of a run on the disk, and batches of them that depend only on the seed and the step.

Text is one long array of tokens, of which a batch takes windows anywhere. Rows of data are packed into sequences, or
have one each, and every pass takes each sequence once. With the tokens of rows goes an array of marks, which says where
rows begin and what the loss counts. As a batch follows from the seed, the step and its number alone, resuming needs no
position in the data, and every step can be drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Batch = dict[str, torch.Tensor]  # the arguments of the model: input_ids and labels, and position_ids of packed rows
IGNORED = -100  # the label that losses of transformers leave out

# Bits of a mark.
COUNTED = 1  # the loss counts this token
BEGINS = 2  # a row begins with this token, or the padding after packed rows


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens that are either trained on or held out."""

    tokens: NDArray[np.uint32] | NDArray[np.uint16]  # [n]; of rows, one sequence after another
    marks: NDArray[np.uint8] | None  # [n], of rows; None for text
    packed: bool  # whether a sequence may hold several rows

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A tokenised corpus. A process to which another sends it maps the same files."""

    folder: Path  # of the files
    train: Part
    held_out: Part
    unigram_entropy: float  # in nats per token, over all counted tokens: the loss of a model that ignores context
    crc32: int  # of all tokens; a resumed run compares it to see that its data is the same

    def __reduce__(self) -> Any:
        train = self.train
        what = self.folder, train.tokens.dtype, train.marks is not None, train.packed
        return map_tokens, (*what, self.unigram_entropy, self.crc32)


def tokens_file(folder: Path, part: str) -> Path:
    """The file for the tokens of ``part``, which is "train" or "held_out"."""
    return folder / f"{part}.bin"


def marks_file(folder: Path, part: str) -> Path:
    """The file for the marks of ``part``."""
    return folder / f"{part}.marks.bin"


def map_tokens(
    folder: Path, dtype: np.dtype[Any], marked: bool, packed: bool, unigram_entropy: float, crc32: int
) -> Tokens:
    """The tokens in the files of ``folder``, with marks if they are ``marked``, as those of rows are."""
    train, held_out = (
        Part(
            tokens=mapped(tokens_file(folder, part), dtype),
            marks=mapped(marks_file(folder, part), np.dtype(np.uint8)) if marked else None,
            packed=packed,
        )
        for part in ("train", "held_out")
    )
    return Tokens(folder=folder, train=train, held_out=held_out, unigram_entropy=unigram_entropy, crc32=crc32)


def entropy(counts: NDArray[np.int64]) -> float:
    """The entropy in nats of tokens, of which each occurs ``counts`` times."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The array in the file ``path``."""
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make ``folder`` for tokens. If the disk is full or not writable, its files are removed and the error says so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:  # an error of writing; what cannot be read raises a ValueError
        for path in folder.glob("*.bin"):
            with suppress(OSError):
                path.unlink()
        raise OSError(
            f"cannot write the tokens of the data to {folder}: {error.strerror or error}; make room there, or give "
            "another --folder"
        ) from None


def check_length(tokens: Tokens, *, sequence: int) -> None:
    """Raise a ValueError if there are fewer training tokens than one sequence has."""
    if len(tokens.train) < sequence:
        raise ValueError(
            f"--data holds {len(tokens.train)} training tokens, fewer than one sequence of {sequence}; "
            f"give more text or a shorter --sequence"
        )


def training_batch(
    tokens: Tokens, *, seed: int, step: int, micro_batch: int, batch: int, sequence: int, micro_batches: int = 1
) -> Batch:
    """Batch number ``micro_batch`` of the ``micro_batches`` of a step, each with arrays [batch, sequence] in int64.

    Text is drawn uniformly. Of rows, each pass takes every sequence once in an order of its own, and the numbers of a
    step's batches say how far it is.
    """
    part = tokens.train
    if part.marks is not None:
        number = step * micro_batches + micro_batch
        return _rows(part, _in_order(len(part) // sequence, seed, number * batch, batch), sequence)
    return _text(part, seed=seed, step=step, micro_batch=micro_batch, batch=batch, sequence=sequence)


def counted_tokens(tokens: Tokens, *, seed: int, step: int, batch: int, sequence: int, micro_batches: int) -> int:
    """The number of tokens that the loss counts in all batches of a step. Every rank finds it without the others."""
    marks = tokens.train.marks
    if marks is None:
        return micro_batches * batch * (sequence - 1)
    count = micro_batches * batch
    chosen = _in_order(len(tokens.train) // sequence, seed, step * count, count)
    return sum(int(np.count_nonzero(marks[start : start + sequence] & COUNTED)) for start in chosen * sequence)


def counted_in(batch: Batch) -> int:
    """The number of tokens that the loss counts in ``batch``. The first of a sequence has nothing before it."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def example_batch(part: Part, *, seed: int, batch: int, sequence: int) -> Batch:
    """A batch to plan for. Of rows it has the sequences with most of them, as only several rows need a mask."""
    if part.marks is None:
        return _text(part, seed=seed, step=0, micro_batch=0, batch=batch, sequence=sequence)
    rows = [np.count_nonzero(part.marks[start : start + sequence] & BEGINS) for start in range(0, len(part), sequence)]
    return _rows(part, np.resize(np.argsort(rows, kind="stable")[::-1], batch), sequence)


def stand_in(sequence: int, *, rows: bool) -> Part:
    """One sequence of text, or of two packed ``rows``, for a plan that is made without the data."""
    tokens, marks = np.zeros(sequence, np.uint16), np.full(sequence, COUNTED, np.uint8)
    marks[[0, sequence // 2]] = BEGINS
    return Part(tokens=tokens, marks=marks if rows else None, packed=rows)


def evaluation_batches(tokens: Tokens, *, batch: int, sequence: int, count: int) -> Iterator[Batch]:
    """At most ``count`` batches [<= batch, sequence], spread evenly over the held-out part.

    They are always the same.
    """
    part = tokens.held_out
    whole = len(part) // sequence
    chosen = np.unique(np.linspace(0, whole - 1, num=min(whole, count * batch)).astype(np.int64))
    for first in range(0, len(chosen), batch):
        now = chosen[first : first + batch]
        if part.marks is not None:
            yield _rows(part, now, sequence)
        else:
            ids = _windows(part.tokens, now * sequence, sequence)
            yield {"input_ids": ids, "labels": ids}


def _in_order(sequences: int, seed: int, first: int, count: int) -> NDArray[np.int64]:
    """The sequences number ``first`` to ``first + count - 1`` of all passes one after another."""
    places = [divmod(number, sequences) for number in range(first, first + count)]
    return np.array([_order(sequences, seed, epoch)[place] for epoch, place in places])


@lru_cache(maxsize=2)  # a step may end one pass and begin the next
def _order(sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(sequences)


def _rows(part: Part, chosen: NDArray[np.int64], sequence: int) -> Batch:
    """The sequences ``chosen``. Positions of packed rows count from the begin of each row."""
    assert part.marks is not None
    ids, marks = (_windows(array, chosen * sequence, sequence) for array in (part.tokens, part.marks))
    batch = {"input_ids": ids, "labels": torch.where(marks & COUNTED != 0, ids, IGNORED)}
    if not part.packed:
        return batch
    places = torch.arange(sequence)
    begins = torch.where(marks & BEGINS != 0, places, 0).cummax(dim=1).values
    return {**batch, "position_ids": places - begins}


def _text(part: Part, *, seed: int, step: int, micro_batch: int, batch: int, sequence: int) -> Batch:
    # numpy would round a list with a seed of 2**63 or more to floats.
    key = np.array([seed, step], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, micro_batch]))
    starts = generator.integers(0, len(part) - sequence, size=batch, endpoint=True)
    ids = _windows(part.tokens, starts, sequence)
    return {"input_ids": ids, "labels": ids}


def _windows(array: NDArray[Any], starts: NDArray[np.int64], sequence: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([array[start : start + sequence] for start in starts]).astype(np.int64))
