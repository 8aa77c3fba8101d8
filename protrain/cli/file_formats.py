"""Recognises files that are not plain text, and knows the commands that make plain text of them.

Training reads files as they are. From JSON lines it would learn braces, quotes and names of fields, and from a
compressed file nothing at all. Some of these formats are text themselves, so looking for zero bytes doesn't find them.

Formats of records are recognised by name. JSON lines are also recognised by content: a file of two or more lines whose
first ten are JSON objects. Binary formats are recognised by content alone, because `README.pt` may well be Portuguese.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_HEAD_BYTES = 8192
_LINES = 10
_LINES_BYTES = 64 * 1024**2  # of the lines that are looked at, because a book may be one line


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format other than plain text."""

    name: str  # completes the sentence "data.jsonl is ..."
    command: str = ""  # writes the plain text of {file} to {stem}.txt in the current folder
    is_data: bool = False  # whether collections of text come in it, so that the user means it where it prevails

    def refusal(self, file: Path) -> str:
        """Why ``file`` is not trained on, and what to do."""
        return f"--data: {file} is {self.name}, and training reads plain text only; {self.remedy(file)}"

    def remedy(self, file: Path) -> str:
        """What to do with ``file``."""
        if not self.command:
            return "give a UTF-8 text file or a folder of them"
        stem = file.name.removesuffix(file.suffix)
        command = self.command.format(file=shlex.quote(str(file)), stem=shlex.quote(f"{stem}-text"))
        field = ", with the name of its own field in place of 'text'" if "'text'" in command else ""
        return f"this writes the text of {file.name} to a file{field}: {command}"


def _python(code: str) -> str:
    return f'python -c "import sys, {code}" {{file}} > {{stem}}.txt'


JSON_LINES = Format(
    name="JSON lines",
    command=_python("json; [print(json.loads(line)['text']) for line in open(sys.argv[1]) if line.strip()]"),
    is_data=True,
)
JSON = Format(
    name="JSON",
    command=_python(
        "json; rows = json.load(open(sys.argv[1])); "
        "[print(row['text']) for row in (rows if isinstance(rows, list) else [rows])]"
    ),
    is_data=True,
)
_TABLE = "csv; csv.field_size_limit(2**31 - 1); [print(row['text']) for row in csv.DictReader(open(sys.argv[1])%s)]"
CSV = Format(name="CSV", command=_python(_TABLE % ""), is_data=True)
TSV = Format(name="TSV", command=_python(_TABLE % ", delimiter='\\t'"), is_data=True)
PARQUET = Format(
    name="Parquet",
    command=_python("pandas; print(*pandas.read_parquet(sys.argv[1])['text'], sep='\\n')"),
    is_data=True,
)
ARROW = Format(
    name="Arrow",
    command=_python("datasets; print(*datasets.Dataset.from_file(sys.argv[1])['text'], sep='\\n')"),
    is_data=True,
)
GZIP = Format(name="compressed by gzip", command="gzip -dc {file} > {stem}.txt", is_data=True)
BZIP2 = Format(name="compressed by bzip2", command="bzip2 -dc {file} > {stem}.txt", is_data=True)
XZ = Format(name="compressed by xz", command="xz -dc {file} > {stem}.txt", is_data=True)
ZSTD = Format(name="compressed by zstd", command="zstd -dc {file} > {stem}.txt", is_data=True)
ZIP = Format(name="a ZIP archive", command="unzip -p {file} > {stem}.txt", is_data=True)
TAR = Format(name="a tar archive", command="tar -xOf {file} > {stem}.txt", is_data=True)
SAVED_SET = Format(
    name="a data set that save_to_disk wrote",
    command=_python("datasets; print(*datasets.load_from_disk(sys.argv[1])['text'], sep='\\n')"),
)
SAVED_SETS = Format(
    name="data sets that save_to_disk wrote",
    command=_python("datasets; print(*datasets.load_from_disk(sys.argv[1])['train']['text'], sep='\\n')"),
)
OBJECTS = Format(name="tensors or Python objects")
PDF = Format(name="PDF", command="pdftotext {file} {stem}.txt")
DOCUMENT = Format(name="a document with layout", command="pandoc -t plain {file} -o {stem}.txt")
BINARY = Format(name="no text, as it holds zero bytes")

_BY_NAME = {".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".csv": CSV, ".tsv": TSV, ".pkl": OBJECTS, ".pickle": OBJECTS}
# Binary files whose names say more than their first bytes. Many formats are ZIP archives inside.
_BINARY = {
    **dict.fromkeys((".pt", ".pth", ".npz", ".safetensors"), OBJECTS),
    **dict.fromkeys((".docx", ".odt", ".epub"), DOCUMENT),
    **dict.fromkeys((".tgz", ".tbz2", ".txz"), TAR),
    **dict.fromkeys((".arrow", ".feather"), ARROW),
}
_BEGINNINGS = (
    (rb"\x1f\x8b", GZIP),
    (rb"BZh[1-9]1AY&SY", BZIP2),
    (rb"\xfd7zXZ\0", XZ),
    (rb"\x28\xb5\x2f\xfd", ZSTD),
    (rb"PK\x03\x04", ZIP),
    (rb".{257}ustar", TAR),
    (rb"PAR1.*\0", PARQUET),
    (rb"ARROW1\0", ARROW),
    (rb"\x93NUMPY|\x80[\x02-\x05]", OBJECTS),
    (rb"%PDF-", PDF),
)


def format_of(file: Path, *, alone: bool = True) -> Format | None:
    """The format of ``file``, or None if it is plain text.

    ``alone`` says that training reads only this file. JSON among other files counts as text unless it is a list of
    objects, because code that people train models on has settings and notebooks in JSON.

    Raises:
        OSError: It cannot be read.
    """
    suffix = file.suffix.lower()
    with open(file, "rb") as opened:
        head = opened.read(_HEAD_BYTES)
        binary = next((found for pattern, found in _BEGINNINGS if re.match(pattern, head, re.DOTALL)), None)
        if binary is None and b"\0" in head:
            binary = BINARY
        if binary is not None:
            if Path(file.stem).suffix.lower() == ".tar" and binary in (GZIP, BZIP2, XZ, ZSTD):
                return TAR
            return _BINARY.get(suffix, binary)
        if suffix in _BY_NAME:
            return _BY_NAME[suffix]
        if _is_json_lines(opened):
            return JSON_LINES
    if suffix == ".json" and (alone or re.match(rb"(\xef\xbb\xbf)?\s*\[\s*\{", head)):
        return JSON
    return None


def format_of_folder(folder: Path) -> Format | None:
    """The format of ``folder`` as a whole, or None if it may be a folder of text files."""
    if (folder / "dataset_dict.json").is_file():
        return SAVED_SETS
    if (folder / "state.json").is_file() and any(folder.glob("*.arrow")):
        return SAVED_SET
    return None


def _is_json_lines(opened: BinaryIO) -> bool:
    """Whether the file has at least two lines that aren't blank, and the first lines are JSON objects."""
    opened.seek(0)
    lines = 0
    for line in _whole_lines(opened):
        if not line.startswith(b"{"):
            return False
        try:
            json.loads(line)  # a line that begins with a brace is an object
        except (ValueError, RecursionError):
            return False
        lines += 1
    return lines > 1


def _whole_lines(opened: BinaryIO) -> Iterator[bytes]:
    """The first lines that aren't blank, stripped of white space."""
    count, left = 0, _LINES_BYTES
    while count < _LINES and (line := opened.readline(left)):
        left -= len(line)
        if not left:
            return
        line = line.removeprefix(b"\xef\xbb\xbf").strip()
        if line:
            count += 1
            yield line
