"""The tensors in a folder of safetensors: its files, their headers, and the values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file, as the file's header describes it."""

    file: Path
    key: str
    dtype: str  # as in the header, for example "BF16"
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``, which may itself be such a file. ValueError if there is none.

    As in transformers these are ``model.safetensors``, or else the files that the index names, or else all. Folders of
    the Hub may have the same weights a second time, in other files and under other names.
    """
    if folder.is_file():
        return [folder]
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        with _must_be_readable(index):
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(named))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"weights: no .safetensors file in {folder}")
    return files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of ``folder`` by their keys, from the files' headers alone.

    Raises:
        ValueError: a file is missing or unreadable.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder.absolute()):  # the weights may be loaded later, from another working folder
        with _must_be_readable(file), open_file(file) as tensors:
            for key in tensors.keys():  # noqa: SIM118 - it is no mapping
                header = tensors.get_slice(key)
                stored = StoredTensor(file=file, key=key, dtype=header.get_dtype(), shape=tuple(header.get_shape()))
                found.setdefault(key, stored)
    return found


@contextmanager
def reading(stored: Iterable[StoredTensor]) -> Iterator[Callable[[StoredTensor], Tensor]]:
    """A function that reads any of ``stored``. Their files stay mapped while the context lasts.

    Raises:
        ValueError: a file cannot be read, when it is opened or later.
    """
    with ExitStack() as stack:
        files = {}
        for file in sorted({tensor.file for tensor in stored}):
            with _must_be_readable(file):
                files[file] = stack.enter_context(open_file(file))

        def read(tensor: StoredTensor) -> Tensor:
            with _must_be_readable(tensor.file):
                return files[tensor.file].get_tensor(tensor.key)

        yield read


def safetensors_package() -> Any:
    """The package ``safetensors``. An ImportError says what to install."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("checkpoints and weights= need the package safetensors: pip install 'protrain[hf]'") from None
    return safetensors


def open_file(file: Path) -> Any:
    """``safetensors.safe_open`` on ``file``, also where its path is not UTF-8, which safetensors itself refuses."""
    with open(file, "rb") as opened:
        return safetensors_package().safe_open(f"/dev/fd/{opened.fileno()}", framework="pt")


@contextmanager
def _must_be_readable(file: Path) -> Iterator[None]:
    """Name ``file`` in the error if reading it fails. Only reads belong inside, as other code may raise the same."""
    try:
        yield
    except (OSError, ValueError, safetensors_package().SafetensorError) as error:
        raise ValueError(f"weights: {file} cannot be read: {error}") from None
