"""Writes tensors to safetensors files of bounded size, flushed to the disk, and reads them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protrain.common.errors import CheckpointError
from protrain.engine.states.parameter_state import StateInPlace
from protrain.engine.states.weight_files import open_file, safetensors_package

FILE_BYTES = 1024**3  # of the files of a node, as far as one file of each of its ranks together
_PIECE_ELEMENTS = 1 << 20  # that are written at once: a save needs this memory a few times
_Content = Tensor | StateInPlace  # of one tensor in a file


@dataclass
class TensorWriter:
    """Collects tensors and writes ``PREFIX-00001.safetensors``, ... of about ``file_bytes`` each.

    Tensors that are added together always share a file, so that a reader needs one file at a time. If they are larger
    than ``file_bytes`` they get a larger file.
    """

    folder: Path
    prefix: str
    file_bytes: int = FILE_BYTES
    # What a manifest says of each written file: its bytes, its CRC-32 and the parameters in it.
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    _pending: dict[str, _Content] = field(default_factory=dict)
    _parameters: dict[str, Any] = field(default_factory=dict)
    _pending_bytes: int = 0

    def add(self, name: str, tensors: Mapping[str, _Content], about: Any = None) -> None:
        """Take ``tensors`` of the parameter ``name`` by their keys in the file, and what a manifest says ``about`` it.

        They must not change until they are written.
        """
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self._pending_bytes + size > self.file_bytes:
            self.flush()
        self._pending |= tensors
        self._pending_bytes += size
        self._parameters[name] = about

    def flush(self) -> None:
        """Write what is pending."""
        if self._pending:
            name = f"{self.prefix}-{len(self.files) + 1:05d}.safetensors"
            written = write_tensors(self.folder / name, self._pending)
            self.files[name] = {**written, "parameters": self._parameters}
            self._pending, self._parameters, self._pending_bytes = {}, {}, 0


def write_tensors(path: Path, tensors: Mapping[str, _Content]) -> dict[str, int]:
    """Write ``tensors`` to ``path`` and flush them to the disk. Returns the "bytes" and the "crc32" of the file.

    They are read, moved to the CPU and written in pieces. So a file takes little memory, however large its tensors are.

    Raises:
        ValueError: a tensor has a type that safetensors files cannot hold.
        OSError: the disk is full or not writable; the message names the file.
    """
    empty = {key: torch.empty(0, dtype=tensor.dtype) for key, tensor in tensors.items()}
    try:
        header = json.loads(safetensors_package().torch.save(empty, {"format": "pt"})[8:])
    except KeyError as error:
        key = next(key for key, tensor in tensors.items() if tensor.dtype is error.args[0])
        raise ValueError(f"{key} is {error.args[0]}, which safetensors files cannot hold") from None
    # A tensor must begin at a multiple of the size of its elements, so those with the largest come first.
    ordered = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)
    stop = 0
    for key in ordered:
        first, stop = stop, stop + tensors[key].nbytes
        header[key] |= {"shape": list(tensors[key].shape), "data_offsets": [first, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    crc32 = 0
    try:
        with open(path, "wb") as file:
            for piece in chain((start,), *(_pieces(tensors[key]) for key in ordered)):
                file.write(piece)
                crc32 = zlib.crc32(piece, crc32)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    sync(path)
    return {"bytes": len(start) + stop, "crc32": crc32}


def _pieces(tensor: _Content) -> Iterator[Any]:
    """The bytes of ``tensor``, in pieces that lie on the CPU."""
    read = tensor.detach().contiguous().view(-1).__getitem__ if isinstance(tensor, Tensor) else tensor.read
    for first in range(0, tensor.shape.numel(), _PIECE_ELEMENTS):
        yield read(slice(first, first + _PIECE_ELEMENTS)).cpu().view(torch.uint8).numpy()


def open_tensors(path: Path) -> Any:
    """``safetensors.safe_open`` on ``path``. A CheckpointError names a file that is no safetensors file.

    An OSError is raised as it is, for example of too many open files, or no memory to map one.
    """
    try:
        return open_file(path)
    except safetensors_package().SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


@contextmanager
def complete_folder(folder: Path, what: str) -> Iterator[Path]:
    """A hidden folder that becomes ``folder`` when the body has ended and all of it is on the disk.

    After an error neither of them is there. ``what`` the folder is for is named in the ValueError if it is not empty or
    a mount point. An OSError says that another process writes it.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a folder of its own for the {what}")
    if folder.is_mount():  # which cannot take the place of another folder
        raise ValueError(f"{folder} is where a disk is mounted: give a folder in it for the {what}")
    folder = folder.resolve()  # a folder cannot be renamed to a link
    scratch = folder.with_name(f".{folder.name}.tmp")
    scratch.mkdir(parents=True, exist_ok=True)
    with used_alone(scratch, f"give another folder for the {what}"):
        try:
            for left in scratch.iterdir():  # by a killed process
                delete(left)
            yield scratch
            for path in scratch.iterdir():
                sync(path)
            put_in_place(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def put_in_place(scratch: Path, folder: Path) -> None:
    """Rename ``scratch``, all of whose files are on the disk, to ``folder``."""
    sync(scratch)
    os.rename(scratch, folder)
    sync(folder.parent)


def delete(path: Path) -> None:
    """Delete a file or a folder. Of a link, by which a save may have been moved to another disk, only itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def used_alone(folder: Path, remedy: str) -> Iterator[None]:
    """Inside, no other process, and no other thread, has a context of this kind for ``folder``, which exists.

    The lock of a killed process ends by itself. File systems without locks on folders have none, as NFS.

    Raises:
        OSError: somebody else has such a context. ``remedy`` says what to do about it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another process writes to {folder} at this moment: {remedy}") from None
        except OSError:
            pass
        yield
    finally:
        with suppress(OSError):  # unlocks it also for child processes that have a copy
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
