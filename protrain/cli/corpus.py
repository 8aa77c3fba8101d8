"""Reads --data: finds it, makes tokens of text or rows, and tells the other ranks."""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from protrain.cli.data import Tokens, entropy, map_tokens, writing
from protrain.cli.examples import Example, ExampleMaker, example_of
from protrain.cli.job import TrainJob
from protrain.cli.metrics import ProgressLine
from protrain.cli.models import LoadedModel
from protrain.cli.packing import RowWriter
from protrain.cli.rows import read_rows
from protrain.cli.run_files import UNFINISHED_DATA
from protrain.cli.sources import find_source, size_bytes
from protrain.cli.text import tokenize
from protrain.cli.workers import in_order
from protrain.distributed.ranks import Ranks
from protrain.hardware.memory import usable_cores

_TELL_S = 10.0  # the time between two signs of life while data is read
_LARGE_BYTES = 32 * 2**20  # of rows; for less it would take longer to start processes than to make the tokens
_MOST_PROCESSES = 16  # more wait for the one that reads the rows and writes the tokens


def read_corpus(job: TrainJob, loaded: LoadedModel, folder: Path, ranks: Ranks, *, sequence: int) -> Tokens:
    """Read --data, on the first rank. Hours of it would outlast a collective, so others hear of it now and then.

    Raises:
        ValueError: The data cannot be read, or options do not fit it.
    """
    if ranks.rank > 0:
        received: Tokens | None = None
        while received is None:
            received = ranks.of_first(received)
        return received
    source = find_source(job.data, exclude=folder)
    if source.kind == "text":
        given = {"--column": job.column, "--chat-template": job.chat_template, "--no-packing": not job.packing}
        for name in (name for name, value in given.items() if value):
            raise ValueError(f"{name} is for rows of data, and --data is read as plain text: leave it out")
    size = size_bytes(source.paths)
    unit, name = (2**20, "MiB") if size >= 2**20 else (2**10, "KiB")
    total = -(-size // unit)
    done, told_s = 0.0, time.monotonic()
    with ProgressLine(f"reading data, {name} ", total) as line:

        def progress(count: float) -> None:
            nonlocal done, told_s
            done += count
            line.update(int(done) // unit, "", plain=False)
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                ranks.of_first(None)

        target = folder / UNFINISHED_DATA
        if source.kind == "text":
            tokens = tokenize(source.paths, loaded.codec, target, held_out=job.held_out, progress=progress)
        else:
            examples = ExampleMaker(codec=loaded.codec, column=job.column, all_tokens=job.loss_on == "all")
            tokens = tokenize_rows(
                source.paths,
                examples,
                target,
                held_out=job.held_out,
                sequence=sequence,
                packing=job.packing,
                processes=min(usable_cores(), _MOST_PROCESSES) if size > _LARGE_BYTES else 1,
                progress=progress,
            )
        line.update(total, "", plain=False)
    return ranks.of_first(tokens)


def tokenize_rows(
    paths: list[Path],
    examples: ExampleMaker,
    folder: Path,
    *,
    held_out: float,
    sequence: int,
    packing: bool = True,
    processes: int = 1,
    progress: Callable[[float], None] = lambda count: None,
) -> Tokens:
    """Write the rows of ``paths`` as token arrays to ``folder`` and map them into memory.

    Without ``packing`` each row has a sequence of its own, filled up with padding. Rows are evenly spread over what is
    trained on and the share ``held_out``. The number of ``processes`` that make tokens changes nothing of the result.
    ``progress`` is told the bytes that each row took.

    Raises:
        ValueError: A row cannot be read or has wrong types, or there is none with a token that the loss counts.
        OSError: The disk is full or not writable. What was written is removed.
    """
    codec = examples.codec
    counts = np.zeros(codec.vocabulary, np.int64)
    crc32 = rows = empty = longer = 0
    with writing(folder), ExitStack() as opened:
        train, evaluation = (
            opened.enter_context(RowWriter(folder, part, codec.dtype, sequence=sequence, packing=packing))
            for part in ("train", "held_out")
        )
        for ids, counted in _examples(paths, examples, processes, progress):
            part = evaluation if int((rows + 1) * held_out) > int(rows * held_out) else train
            rows += 1
            counted[:1] = False  # nothing before it belongs to the row
            if not counted.any():
                empty += 1
                continue
            longer += len(ids) > sequence
            counts += np.bincount(ids[counted], minlength=codec.vocabulary)
            crc32 = zlib.crc32(counted.tobytes(), zlib.crc32(ids.tobytes(), crc32))
            part.add(ids, counted)
        padding = codec.separator or 0
        for part in (train, evaluation):
            part.finish(padding)
    if not rows:
        raise ValueError(f"--data: {paths[0]} holds no rows: it is empty")
    if empty == rows:
        raise ValueError(
            f"--data: no row of {paths[0]} has a token that the loss counts, which are those of a message whose role "
            "is assistant, of a completion, and of a text behind its first token; --loss-on all counts all"
        )
    for count, what in (
        (empty, "have no token that the loss counts, and are left out"),
        (longer, f"are longer than --sequence {sequence}, and are cut into pieces of that length"),
    ):
        if count:
            warnings.warn(f"--data: {count} of {rows} rows {what}", stacklevel=2)
    return map_tokens(folder, codec.dtype, True, packing, entropy(counts), crc32)


def _examples(
    paths: list[Path], examples: ExampleMaker, processes: int, progress: Callable[[float], None]
) -> Iterator[Example]:
    """The examples of all rows. Errors name the row."""
    for path in paths:
        size, done, rows = size_bytes([path]), 0.0, read_rows(path)
        first = next(rows, None)
        if first is None:
            continue
        try:
            make = examples.maker(first.values)
        except ValueError as error:
            raise ValueError(f"--data: {first.place}: {error}") from None
        for example, share in in_order(partial(example_of, make), chain([first], rows), processes):
            yield example
            progress((share - done) * size)
            done = share
