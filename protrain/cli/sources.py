"""Finds the files that --data means, and says whether training reads them as plain text or as rows of data.

Rows of data come in formats that are recognised by name: JSON lines, JSON lists, CSV, Parquet, Arrow, and folders that
``save_to_disk`` of the package datasets wrote. Other formats are refused, because training would learn their bytes.
Refused formats are recognised by content, as `README.pt` may well be Portuguese.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from protrain.cli.job import is_run
from protrain.cli.run_files import JOB_FILE

_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
_HEAD_BYTES = 65536

Kind = Literal["text", "rows"]
_READABLE = "a UTF-8 text file, JSON lines, a JSON list, CSV, Parquet, Arrow, or a folder of one of these"
ROW_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
BINARY_ROW_FORMATS = (".parquet", ".arrow")


@dataclass(frozen=True)
class Unread:
    """A format that training does not read."""

    name: str  # completes the sentence "data.gz is ..."
    remedy: str = f"give {_READABLE}"
    is_data: bool = False  # whether collections of text come in it, so that the user means it where it prevails


_PACKED = Unread("compressed, or an archive", "unpack it", is_data=True)
_NAMELESS_ROWS = Unread("JSON lines under another name", "end its name in .jsonl", is_data=True)
_BINARY = Unread("no text, as it holds zero bytes")
_BEGINNINGS = (
    (rb"\x1f\x8b|BZh[1-9]1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|PK\x03\x04|.{257}ustar", _PACKED),
    (rb"PAR1.*\0", Unread("Parquet under another name", "end its name in .parquet", is_data=True)),
    (rb"\x93NUMPY|\x80[\x02-\x05]", Unread("tensors or Python objects")),
    (rb"\xff\xfe|\xfe\xff", Unread("text in UTF-16", "convert it, as `iconv -f utf-16 -t utf-8` does", is_data=True)),
    (rb"%PDF-", Unread("PDF", "convert it, as pdftotext does")),
)


@dataclass(frozen=True)
class Source:
    """What --data means: files, or one folder of the package datasets, that are all read in one way."""

    kind: Kind
    paths: list[Path]


def find_source(path: str | os.PathLike[str] | None, *, exclude: Path | None = None) -> Source:
    """The files of ``path``, which is a file, a folder to search, or None for Python's own sources.

    A folder is read as text or as rows, whichever has more bytes, and files that are neither do not count unless they
    are compressed. The rest is left out with a warning. JSON that is no list of records counts as text, because sources
    contain it, unless there is more of it than of other text, in files and in bytes. Where names of rows' files say
    "train", only those are read.

    What runs have left in ``path`` is left out, because it grows while they train. ``exclude`` will be a run's folder.

    Raises:
        ValueError: ``path`` does not exist, is no regular file, holds nothing to read, or holds another format.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [
            file for file in sorted(root.rglob("*.py")) if not _SKIPPED_FOLDERS & set(file.relative_to(root).parts)
        ]
        return Source("text", files)
    root = Path(path)
    if root.is_file():
        kind = _kind(root, alone=True)
        if isinstance(kind, Unread):
            raise ValueError(f"--data: {root} is {kind.name}; {kind.remedy}")
        return Source(kind, [root])
    if not root.is_dir():
        what = f"is no regular file; give {_READABLE}" if root.exists() else "does not exist"
        raise ValueError(f"--data: {root} {what}")
    if (root / "dataset_dict.json").is_file() or ((root / "state.json").is_file() and any(root.glob("*.arrow"))):
        return Source("rows", [root])
    return _prevailing(root, _files_in(root, exclude))


def _files_in(root: Path, exclude: Path | None) -> list[Path]:
    files = [
        file
        for file in sorted(root.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)
    ]
    runs = {file.parent for file in files if file.name == JOB_FILE and is_run(file.parent)}
    if exclude is not None and exclude.resolve().is_relative_to(root.resolve()):
        runs.add(root / exclude.resolve().relative_to(root.resolve()))
    return [file for file in files if not runs.intersection(file.parents)]


def _prevailing(root: Path, files: list[Path]) -> Source:
    """What ``files``, which were all found in the folder ``root``, are read as."""
    found: dict[Kind | Unread, list[Path]] = {"text": [], "rows": []}
    for file in files:
        found.setdefault(_kind(file, alone=False), []).append(file)
    objects = [file for file in found["text"] if file.suffix.lower() == ".json"]
    prose = [file for file in found["text"] if file.suffix.lower() != ".json"]
    if len(objects) >= len(prose) and size_bytes(objects) > size_bytes(prose):
        found["text"], found["rows"] = prose, sorted(found["rows"] + objects)
    named_train = [file for file in found["rows"] if says_train(file.relative_to(root))]
    unnamed = [file for file in found["rows"] if named_train and file not in named_train]
    found["rows"] = named_train or found["rows"]

    most = max(found, key=lambda kind: size_bytes(found[kind]) if isinstance(kind, str) or kind.is_data else 0)
    if isinstance(most, Unread):
        raise ValueError(f"--data: most of {root} is {most.name} ({_listed(found[most])}); {most.remedy}")
    chosen = found.pop(most)
    if not chosen:
        raise ValueError(f"--data: {root} holds nothing to read; give {_READABLE}")
    others = {kind if isinstance(kind, str) else kind.name: left_out for kind, left_out in found.items() if left_out}
    if unnamed:
        others["rows that are not named train"] = unnamed
    if others:
        listed = "; ".join(f"{_listed(left_out)}: {name}" for name, left_out in others.items())
        warnings.warn(f"--data: {root} is read as {most}, and left out are {listed}", stacklevel=3)
    return Source(most, chosen)


def says_train(file: Path) -> bool:
    """Whether the name of ``file``, or of a folder that it is in, has the word "train"."""
    return "train" in re.split(r"[^a-z]+", str(file).lower())


def _kind(file: Path, *, alone: bool) -> Kind | Unread:
    suffix = file.suffix.lower()
    if suffix in BINARY_ROW_FORMATS:
        return "rows"
    try:
        with open(file, "rb") as opened:
            head = opened.read(_HEAD_BYTES)
    except OSError as error:
        raise ValueError(f"--data: cannot read {file}: {error.strerror}") from None
    for pattern, kind in _BEGINNINGS:
        if re.match(pattern, head, re.DOTALL):
            return kind
    if b"\0" in head:
        return _BINARY
    if suffix in ROW_FORMATS:
        is_rows = suffix != ".json" or alone or re.match(rb"(\xef\xbb\xbf)?\s*\[\s*\{", head)
        return "rows" if is_rows else "text"
    return _NAMELESS_ROWS if _is_json_lines(head) else "text"


def _is_json_lines(head: bytes) -> bool:
    """Whether a file with this ``head`` begins with two lines that are JSON objects."""
    lines = [line for line in head.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()][:2]
    try:
        return len(lines) == 2 and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def _listed(files: Sequence[Path]) -> str:
    return f"{files[0]} and {len(files) - 1} more" if len(files) > 1 else str(files[0])


def size_bytes(paths: Sequence[Path]) -> int:
    """The bytes of files, and of those with rows in folders that ``save_to_disk`` wrote."""
    files = chain.from_iterable(path.rglob("*.arrow") if path.is_dir() else [path] for path in paths)
    return sum(file.stat().st_size for file in files)
