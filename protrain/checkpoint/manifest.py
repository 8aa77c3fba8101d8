"""The manifest of a save: its files with their sizes and CRC-32, and everything that is not a tensor."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protrain.checkpoint.tensor_files import file_crc32
from protrain.common.errors import CheckpointError

FORMAT = 3
MANIFEST = "checkpoint.json"
_SAVE = re.compile(r"(\d{5,})-step-(\d+)")


def list_saves(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete saves in ``folder``, the oldest first."""
    saves = [path for path in Path(folder).glob("*") if _SAVE.fullmatch(path.name) and path.is_dir()]
    return sorted(saves, key=lambda path: int(path.name.partition("-")[0]))


def find_save(folder: Path) -> Path:
    """``folder`` if it is a save, otherwise the newest save in it. Raises a CheckpointError if there is none."""
    if (folder / MANIFEST).exists():
        return folder
    saves = list_saves(folder)
    if not saves:
        what = "holds no checkpoint" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        inner = next((path for path in sorted(folder.glob("*")) if list_saves(path)), None)  # as in a run's folder
        place = "the folder that save_checkpoint wrote to" if inner is None else f"{inner}, which holds some"
        raise CheckpointError(f"{folder} {what}; give {place}")
    return saves[-1]


def write_manifest(save: Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest``, with its format and its own CRC-32, and flush it to the disk. An OSError names the file."""
    whole = {"format": FORMAT, **manifest}
    try:
        with open(save / MANIFEST, "w", encoding="utf-8") as file:
            json.dump({**whole, "crc32": _own_crc32(whole)}, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(f"cannot write {save / MANIFEST}: {error.strerror or error}") from error


def read_manifest(save: Path) -> dict[str, Any]:
    """What ``write_manifest`` was given. Raises a CheckpointError if it cannot be read or is damaged."""
    with _reading(save / MANIFEST):
        text = (save / MANIFEST).read_bytes()
    try:
        manifest = json.loads(text)
    except ValueError:
        manifest = None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise CheckpointError(
            f"{save / MANIFEST} has format {found}, and this version of ProTrain reads formats up to {FORMAT}: "
            "load it with the version that wrote it, or a newer one"
        )
    if found is None or manifest.pop("crc32", None) != _own_crc32(manifest):
        raise CheckpointError(f"{save / MANIFEST} is damaged: its checksum differs; {_remedy(save)}")
    return manifest


def check_files(save: Path, manifest: dict[str, Any]) -> None:
    """Raise a CheckpointError unless every file exists and has the size that ``manifest`` says.

    Nothing is read, however large the save is. ``verify_bytes`` does the rest.
    """
    for name, entry in manifest["files"].items():
        with _reading(save / name):
            size = (save / name).stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{save / name} has {size} bytes instead of {entry['bytes']}; {_remedy(save)}")


def verify_bytes(save: Path, files: Mapping[str, dict[str, Any]]) -> None:
    """Raise a CheckpointError unless each of ``files``, entries of the manifest, has the bytes that were saved.

    Their sizes were checked before.
    """
    with ThreadPoolExecutor(max_workers=4) as pool:
        for name, crc32 in zip(files, pool.map(lambda name: _crc32(save / name), files), strict=True):
            if crc32 != files[name]["crc32"]:
                raise CheckpointError(f"{save / name} is damaged: its checksum differs; {_remedy(save)}")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Give errors of reading ``path``, a file of a save, as a CheckpointError with the remedy."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {_remedy(path.parent)}") from None
    except OSError as error:  # its bytes may be whole, so nothing should be deleted
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}; its contents may be whole: check its permissions and its "
            "disk"
        ) from None


def _own_crc32(manifest: dict[str, Any]) -> int:
    """The CRC-32 of a manifest's contents, whatever the order of its keys."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _crc32(path: Path) -> int:
    with _reading(path):
        return file_crc32(path)


def _remedy(save: Path) -> str:
    """What to do about the damaged ``save``: load the one before it, if there is one."""
    older = [other for other in list_saves(save.parent) if other.name < save.name]
    if older:
        return f"delete {save} to go on from {older[-1].name}, or load that folder"
    return "there is no older save beside it: put a whole copy of it back, or start anew in another folder"
