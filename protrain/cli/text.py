"""Tokenises plain text.

Documents are tokenised one after another into two arrays on the disk. The last part of every document is held out for
evaluation, and the rest trains, so one file and a folder of thousands are split by the same rule.
"""

from __future__ import annotations

import codecs
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protrain.cli.codec import Codec
from protrain.cli.data import Tokens, entropy, map_tokens, tokens_file, writing

_PIECE_BYTES = 256 * 1024  # tokenised at once, in about 200 times as much memory


def tokenize(
    documents: list[Path],
    codec: Codec,
    folder: Path,
    *,
    held_out: float,
    progress: Callable[[int], None] = lambda count: None,
) -> Tokens:
    """Write ``documents`` as token arrays to ``folder`` and map them into memory.

    The share ``held_out`` of every document is kept for evaluation. ``progress`` is told the bytes of every piece.

    Raises:
        ValueError: There are no tokens at all, or the codec needs UTF-8 and a document is in another encoding.
        OSError: The disk is full or not writable. What was written is removed.
    """
    if codec.tokenizer is not None:  # checked before the first document, because tokenising all may take hours
        _refuse_other_encodings(documents)
    with writing(folder):
        counts, crc32 = _write(documents, codec, folder, held_out, progress)
    if not counts.any():
        where = documents[0] if len(documents) == 1 else documents[0].parent
        raise ValueError(f"--data: {where} holds no text: it is empty")
    return map_tokens(folder, codec.dtype, False, False, entropy(counts), crc32)


def _write(
    documents: list[Path], codec: Codec, folder: Path, held_out: float, progress: Callable[[int], None]
) -> tuple[NDArray[np.int64], int]:
    """Write both files. Returns the count of each token, and the checksum of all tokens."""
    counts = np.zeros(codec.vocabulary, np.int64)
    crc32 = 0
    dtype = codec.dtype
    separator: NDArray[Any] = np.array([] if codec.separator is None else [codec.separator], dtype)
    with open(tokens_file(folder, "train"), "wb+") as train, open(tokens_file(folder, "held_out"), "wb") as evaluation:
        for document in documents:
            start, line = train.tell(), 1
            for number, piece in enumerate(_pieces(document)):
                text = piece if number else piece.removeprefix(codecs.BOM_UTF8)  # a sign of the encoding, and no text
                tokens = _encoded(codec, text, document, line).astype(dtype)
                line += piece.count(b"\n")
                counts += np.bincount(tokens, minlength=codec.vocabulary)
                crc32 = zlib.crc32(tokens.tobytes(), crc32)
                train.write(tokens.tobytes())
                progress(len(piece))
            length = (train.tell() - start) // dtype.itemsize
            if not length:
                continue
            train.write(separator.tobytes())
            # The end of the document is moved to the other file once its length is known, so that no document need fit
            # in memory.
            train.seek(-int(length * held_out) * dtype.itemsize, os.SEEK_END)
            kept = train.tell()
            shutil.copyfileobj(train, evaluation)
            train.truncate(kept)
            train.seek(kept)
    return counts, crc32


def _encoded(codec: Codec, text: bytes, document: Path, line: int) -> NDArray[Any]:
    """The tokens of ``text``, which begins in that ``line`` of ``document``. Errors name the line."""
    try:
        return codec.encode(text)
    except ValueError as error:
        raise ValueError(f"--data: {document}, line {line + _lines_before_error(codec, text)}: {error}") from None


def _lines_before_error(codec: Codec, text: bytes) -> int:
    for number, line in enumerate(text.split(b"\n")):
        try:
            codec.encode(line)
        except ValueError:
            return number
    return 0  # a token that goes over several lines


def _refuse_other_encodings(documents: list[Path]) -> None:
    wrong = {document: place for document in documents if (place := not_utf8(document))}
    if wrong:
        first, place = next(iter(wrong.items()))
        which = f"{first} is no UTF-8 text"
        if len(wrong) > 1:
            which = f"{len(wrong)} of {len(documents)} files are no UTF-8 text, the first {first}"
        raise ValueError(f"--data: {which}{place}, or leave out what is no text")


def not_utf8(document: Path) -> str | None:
    """Where ``document`` is no UTF-8 and what to do, to put behind "a.txt is no UTF-8 text"; None if all of it is."""
    done, line = 0, 1
    for piece in _pieces(document):
        try:
            piece.decode()
        except UnicodeDecodeError as error:
            line += piece[: error.start].count(b"\n")
            found = f"line {line} has byte 0x{piece[error.start]:02x} at offset {done + error.start} of the file"
            return f": {found}; convert it, as `iconv -f latin1 -t utf-8` does"
        done += len(piece)
        line += piece.count(b"\n")
    return None


def _pieces(document: Path) -> Iterator[bytes]:
    """The document in pieces of about a quarter MiB, which end at the end of a line, a word or at least a character."""
    try:
        with open(document, "rb") as file:
            piece = b""
            while read := file.read(_PIECE_BYTES):
                piece += read
                if len(piece) < _PIECE_BYTES:  # the document ends
                    continue
                end = piece.rfind(b"\n") + 1 or max(piece.rfind(b" "), 0) or _end_of_character(piece)
                yield piece[:end]
                piece = piece[end:]
            if piece:
                yield piece
    except OSError as error:
        raise ValueError(f"--data: cannot read {document}: {error.strerror}") from None


def _end_of_character(piece: bytes) -> int:
    """The end of the last character of UTF-8 text that is whole for certain."""
    end = len(piece)
    while end > len(piece) - 4 and piece[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if piece[end - 1] >= 0xC0 else end
