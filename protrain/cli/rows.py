"""Reads rows of data, one after another, so that no file need fit in memory.

JSON and CSV are read with Python's own modules, which name the line of a mistake and take each row as it is. Packages
that make tables of them guess a type for every column. Parquet and Arrow files and folders that ``save_to_disk`` wrote
are read with the package datasets and the pyarrow that it brings.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from protrain.cli.options import need
from protrain.cli.text import not_utf8

_PIECE_CHARACTERS = 1024**2  # of a JSON list, which are read at once
_PARQUET_ROWS = 256


class Row(NamedTuple):
    """A row of data."""

    place: str  # for messages: the file, and the line or row in it
    values: dict[str, Any]  # by column
    share: float  # of the file, that is read


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, or of a folder that ``save_to_disk`` wrote.

    Raises:
        ValueError: Something is no row, cannot be read, or the packages that read it are missing.
    """
    read = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".arrow": _saved}.get(path.suffix.lower(), _json)
    try:
        yield from (_saved if path.is_dir() else read)(path)
    except OSError as error:
        raise ValueError(f"--data: cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--data: {path} is no UTF-8 text{not_utf8(path) or ''}") from None


def _json(path: Path) -> Iterator[Row]:
    with open(path, "rb") as file:
        is_list = re.match(rb"(\xef\xbb\xbf)?\s*\[", file.read(4096))
    return (_json_list if is_list else _json_lines)(path)


def _json_lines(path: Path) -> Iterator[Row]:
    size, done = path.stat().st_size, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            done += len(line)
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                values = json.loads(line.strip())
            except UnicodeDecodeError:
                raise
            except (ValueError, RecursionError) as error:
                raise ValueError(f"--data: {place} is not JSON: {_what(error)}") from None
            yield _row(place, values, done / size)


def _json_list(path: Path) -> Iterator[Row]:
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    size, number = path.stat().st_size, 0
    with open(path, "rb") as file, io.TextIOWrapper(file, "utf-8-sig") as characters:
        text = characters.read(_PIECE_CHARACTERS)
        at = text.index("[") + 1
        while True:
            gap = between.match(text, at)
            assert gap is not None, "it also matches nothing"
            at = gap.end()
            if text[at : at + 1] == "]":
                return
            try:
                values, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:  # the row goes on behind what is read, or is wrong
                more = characters.read(max(_PIECE_CHARACTERS, len(text) - at))
                if not more:
                    raise ValueError(f"--data: {path}, row {number + 1} is not JSON: {_what(error)}") from None
                text, at = text[at:] + more, 0
                continue
            number += 1
            yield _row(f"{path}, row {number}", values, file.tell() / size)


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    size = path.stat().st_size
    with open(path, "rb") as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as characters:
        reader = csv.DictReader(characters, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            columns = list(reader.fieldnames or ())
            twice = next((name for name in columns if columns.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"--data: {path}, line 1 has two columns with the name {twice!r}: rename one of them")
            for values in reader:
                place = f"{path}, line {reader.line_num}"
                if None in values or None in values.values():
                    raise ValueError(f"--data: {place} has more or fewer fields than the first line names columns")
                yield _row(place, values, file.tell() / size)
        except csv.Error as error:
            raise ValueError(f"--data: {path}, what follows line {reader.line_num} is not CSV: {error}") from None


def _parquet(path: Path) -> Iterator[Row]:
    need("pyarrow", f"--data: reading {path}", extra="data", package="datasets")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        file = ParquetFile(path)
        for batch in file.iter_batches(_PARQUET_ROWS):
            for values in batch.to_pylist():
                number += 1
                yield _row(f"{path}, row {number}", values, number / file.metadata.num_rows)
    except ArrowException as error:
        raise ValueError(f"--data: {path} cannot be read as Parquet: {error}") from None


def _saved(path: Path) -> Iterator[Row]:
    need("datasets", f"--data: reading {path}", extra="data")
    import datasets

    try:
        found = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_file(str(path))
    except Exception as error:
        raise ValueError(f"--data: {path} cannot be read by the package datasets: {error}") from None
    if isinstance(found, dict):
        if "train" not in found:
            raise ValueError(
                f"--data: {path} has no split named train, but {', '.join(found)}: give one of these folders in it"
            )
        found = found["train"]
    for number, values in enumerate(found, 1):
        yield _row(f"{path}, row {number}", values, number / len(found))


def _what(error: Exception) -> str:
    """What ``error`` says is wrong, without the place, which it counts from the begin of a piece of the file."""
    return error.msg.removesuffix(" starting at") if isinstance(error, json.JSONDecodeError) else str(error)


def _row(place: str, values: Any, share: float) -> Row:
    if not isinstance(values, dict):
        raise ValueError(f"--data: {place} is no object with columns, but {type(values).__name__}")
    return Row(place, values, share)
