"""Turns text into tokens on the disk, and these into batches that depend only on the seed and the step.

Documents are tokenised one after another into two memory-mapped arrays. The last part of every document is held out for
evaluation, and the rest trains, so one file and a folder of thousands are split by the same rule. A batch is drawn from
the seed and the step alone. So resuming needs no position in the data, and every step can be drawn again.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protrain.cli.file_formats import ARROW, JSON, Format, format_of, format_of_folder
from protrain.cli.job import is_run
from protrain.cli.run_files import JOB_FILE

_FILES = ("train.bin", "held_out.bin")
_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
_PIECE_BYTES = 1024**2  # the bytes that are tokenised at once


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A tokenised corpus. A process to which another sends it maps the same files."""

    folder: Path  # of the files
    train: NDArray[np.uint32] | NDArray[np.uint16]  # [n_train]
    held_out: NDArray[np.uint32] | NDArray[np.uint16]  # [n_held_out]
    documents: int
    unigram_entropy: float  # in nats per token, over all tokens: the loss of a model that ignores context
    crc32: int  # of all tokens; a resumed run compares it to see that its data is the same

    def __reduce__(self) -> Any:
        counted = {name: getattr(self, name) for name in ("documents", "unigram_entropy", "crc32")}
        return partial(_map, self.folder, self.train.dtype, **counted), ()


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Converts text to token ids and back, with a tokenizer or by bytes."""

    encode: Callable[[bytes], list[int] | NDArray[np.uint8]]  # takes UTF-8 text
    decode: Callable[[list[int]], str]
    separator: int | None  # the token after every document
    vocabulary: int  # all token ids are smaller
    any_bytes: bool  # whether text in other encodings than UTF-8 can be converted


def byte_codec() -> Codec:
    """A codec with bytes as tokens. Byte 0, which text does not contain, separates documents.

    Other tokens of a model are no text and are left out in decoding.
    """
    return Codec(
        encode=lambda text: np.frombuffer(text, np.uint8),
        decode=lambda tokens: bytes(token for token in tokens if 0 < token < 256).decode(errors="replace"),
        separator=0,
        vocabulary=256,
        any_bytes=True,
    )


def tokenizer_codec(tokenizer: Any) -> Codec:
    """The codec of a transformers tokenizer."""
    return Codec(
        encode=lambda text: tokenizer(text.decode(), add_special_tokens=False, verbose=False)["input_ids"],
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        separator=tokenizer.eos_token_id,
        vocabulary=len(tokenizer),
        any_bytes=False,
    )


def find_documents(path: str | os.PathLike[str] | None, *, exclude: Path | None = None) -> list[Path]:
    """The text files of ``path``, which is a file, a folder to search, or None for Python's own sources.

    Text is what training reads as it is: prose, sources, markup. ``protrain.cli.file_formats`` recognises files in
    other formats. Such a file is refused if it is given alone. In a folder it is left out with a warning. But if data
    formats hold more bytes than the text, the folder is refused, because the user means the data and not the README
    beside it. JSON that is no list of records counts as text in a folder, because sources contain it, unless there is
    more of it than of other text, in files and in bytes.

    What runs have left in ``path`` is not text, because it grows while they train. ``exclude`` will be a run's folder.

    Raises:
        ValueError: ``path`` does not exist, is no regular file, holds no text file, or holds it in another format.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [
            file for file in sorted(root.rglob("*.py")) if not _SKIPPED_FOLDERS & set(file.relative_to(root).parts)
        ]
    else:
        root = Path(path)
        if root.is_file():
            found = _format_of(root, alone=True)
            if found is not None:
                raise ValueError(found.refusal(root))
            return [root]
        if root.exists() and not root.is_dir():
            raise ValueError(f"--data: {root} is no regular file; give a UTF-8 text file or a folder of them")
        if not root.is_dir():
            raise ValueError(f"--data: {root} does not exist")
        whole = format_of_folder(root)
        if whole is not None:
            raise ValueError(whole.refusal(root))
        files = [
            file
            for file in sorted(root.rglob("*"))
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)
        ]
        runs = {file.parent for file in files if file.name == JOB_FILE and is_run(file.parent)}
        if exclude is not None and exclude.resolve().is_relative_to(root.resolve()):
            runs.add(root / exclude.resolve().relative_to(root.resolve()))
        files = [file for file in files if not runs.intersection(file.parents)]
    return _text_files(files, root)


def _text_files(files: list[Path], root: Path) -> list[Path]:
    """The text files among ``files``, which were all found in the folder ``root``."""
    saved_sets = {folder for folder in {file.parent for file in files} if format_of_folder(folder) is not None}
    texts: list[Path] = []
    others: dict[Format, list[Path]] = {}
    for file in files:
        found = ARROW if file.parent in saved_sets else _format_of(file, alone=False)
        (texts if found is None else others.setdefault(found, [])).append(file)
    settings = [file for file in texts if file.suffix.lower() == ".json"]
    rest = [file for file in texts if file.suffix.lower() != ".json"]
    if len(settings) >= len(rest) and _size_bytes(settings) > _size_bytes(rest):
        others.setdefault(JSON, []).extend(settings)
        texts = rest
    sizes = {found: _size_bytes(left_out) for found, left_out in others.items() if found.is_data or not texts}
    if sizes and sum(sizes.values()) >= _size_bytes(texts):
        most = max(sizes, key=lambda found: sizes[found])
        holds = "more bytes in other formats than in text" if texts else "no text file"
        move = "move those elsewhere or make text of them; " if texts else ""
        raise ValueError(
            f"--data: {root} holds {holds} ({_listed(most, others[most])}), and training reads plain text only; "
            f"{move}{most.remedy(others[most][0])}"
        )
    if not texts:
        raise ValueError(f"--data: {root} holds no text file; give a UTF-8 text file or a folder of them")
    if others:
        left_out = "; ".join(_listed(found, files) for found, files in others.items())
        warnings.warn(f"--data: left out, because training reads plain text only: {left_out}", stacklevel=3)
    return texts


def _listed(found: Format, files: list[Path]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more}: {found.name}"


def _size_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _format_of(file: Path, *, alone: bool) -> Format | None:
    try:
        return format_of(file, alone=alone)
    except OSError as error:
        raise ValueError(f"--data: cannot read {file}: {error.strerror}") from None


def tokenize(
    documents: list[Path],
    codec: Codec,
    folder: Path,
    *,
    held_out: float,
    progress: Callable[[int], None] = lambda count: None,
) -> Tokens:
    """Write ``documents`` as token arrays to ``folder`` and map them into memory.

    Parameters:
        documents: UTF-8 files.
        codec: Converts text to ids.
        folder: Gets train.bin and held_out.bin.
        held_out: The share of every document that is kept for evaluation, 0 <= held_out < 1.
        progress: Called with the bytes of every piece that is done.

    Raises:
        ValueError: There are no tokens at all, or the codec needs UTF-8 and a document is in another encoding.
        OSError: The disk is full or not writable. What was written is removed.
    """
    if not codec.any_bytes:  # checked before the first document, because tokenising all may take hours
        _refuse_other_encodings(documents)
    dtype = np.dtype(np.uint16 if codec.vocabulary <= 2**16 else np.uint32)
    separator = np.array([] if codec.separator is None else [codec.separator], dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        counts, crc32 = _write(documents, codec, folder, dtype, separator, held_out, progress)
    except OSError as error:  # an error of writing; what cannot be read raises a ValueError
        for name in _FILES:
            with suppress(OSError):
                (folder / name).unlink()
        raise OSError(
            f"cannot write the tokens of the text to {folder}: {error.strerror or error}; make room there, or give "
            "another --folder"
        ) from None
    if not counts.any():
        where = documents[0] if len(documents) == 1 else documents[0].parent
        raise ValueError(f"--data: {where} holds no text: it is empty")
    return _map(folder, dtype, documents=len(documents), unigram_entropy=_entropy(counts), crc32=crc32)


def _map(folder: Path, dtype: np.dtype[Any], **counted: Any) -> Tokens:
    """The tokens that :func:`tokenize` has written to ``folder``."""
    train, held_out = (_mapped(folder / name, dtype) for name in _FILES)
    return Tokens(folder=folder, train=train, held_out=held_out, **counted)


def _write(
    documents: list[Path],
    codec: Codec,
    folder: Path,
    dtype: np.dtype[Any],
    separator: NDArray[Any],
    held_out: float,
    progress: Callable[[int], None],
) -> tuple[NDArray[np.int64], int]:
    """Write both files. Returns the count of each token, and the checksum of all tokens."""
    counts = np.zeros(codec.vocabulary, np.int64)
    crc32 = 0
    with open(folder / _FILES[0], "wb+") as train, open(folder / _FILES[1], "wb") as evaluation:
        for document in documents:
            start = train.tell()
            for piece in _pieces(document):
                tokens = np.asarray(codec.encode(piece)).astype(dtype)
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


def check_length(tokens: Tokens, *, sequence: int) -> None:
    """Raise a ValueError if there are fewer training tokens than one sequence has."""
    if len(tokens.train) < sequence:
        raise ValueError(
            f"--data holds {len(tokens.train)} training tokens, fewer than one sequence of {sequence}; "
            f"give more text or a shorter --sequence"
        )


def training_batch(
    tokens: Tokens, *, seed: int, step: int, micro_batch: int, batch: int, sequence: int
) -> torch.Tensor:
    """Token ids [batch, sequence] in int64, drawn uniformly from the training part by (seed, step, micro_batch)."""
    # numpy would round a list with a seed of 2**63 or more to floats.
    key = np.array([seed, step], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, micro_batch]))
    starts = generator.integers(0, len(tokens.train) - sequence, size=batch, endpoint=True)
    return _windows(tokens.train, starts, sequence)


def seed_micro_batch(*, seed: int, step: int, micro_batch: int) -> None:
    """Seed torch's generators for a micro-batch, so that its dropout depends on neither rank nor earlier ones."""
    state = np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def evaluation_batches(tokens: Tokens, *, batch: int, sequence: int, count: int) -> Iterator[torch.Tensor]:
    """At most ``count`` batches [<= batch, sequence], spread evenly over the held-out part.

    They are always the same.
    """
    whole = len(tokens.held_out) // sequence
    chosen = np.unique(np.linspace(0, whole - 1, num=min(whole, count * batch)).astype(np.int64)) * sequence
    for first in range(0, len(chosen), batch):
        yield _windows(tokens.held_out, chosen[first : first + batch], sequence)


def _windows(array: NDArray[Any], starts: NDArray[np.int64], sequence: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([array[start : start + sequence] for start in starts]).astype(np.int64))


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _entropy(counts: NDArray[np.int64]) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _refuse_other_encodings(documents: list[Path]) -> None:
    wrong = {document: place for document in documents if (place := _not_utf8(document))}
    if wrong:
        first, place = next(iter(wrong.items()))
        which = f"{first} is no UTF-8 text"
        if len(wrong) > 1:
            which = f"{len(wrong)} of {len(documents)} files are no UTF-8 text, the first {first}"
        raise ValueError(
            f"--data: {which}: it has byte 0x{place[1]:02x} at offset {place[0]}, and the model's tokenizer takes "
            "only UTF-8; convert such text, as `iconv -f latin1 -t utf-8` does, and leave out what is none"
        )


def _not_utf8(document: Path) -> tuple[int, int] | None:
    """The offset and the value of the first byte of ``document`` that is not UTF-8."""
    done = 0
    for piece in _pieces(document):
        try:
            piece.decode()
        except UnicodeDecodeError as error:
            return done + error.start, piece[error.start]
        done += len(piece)
    return None


def _pieces(document: Path) -> Iterator[bytes]:
    """The document in pieces that end at line ends, so that a tokenizer never gets much more than 1 MiB."""
    try:
        with open(document, "rb") as file:
            while lines := file.readlines(_PIECE_BYTES):
                yield b"".join(lines)
    except OSError as error:
        raise ValueError(f"--data: cannot read {document}: {error.strerror}") from None
