"""The manifest of a save: its files with their sizes and CRC-32, and all that is not a tensor, as JSON values."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protrain.checkpoint.tensor_files import sync
from protrain.common.errors import CheckpointError

FORMAT = 5
MANIFEST = "checkpoint.json"
EXTRA = "extra/"  # the prefix of tensors that ``encode`` takes out of values
STATES = "protrain"  # the folder of saves in a checkpoint of the Trainer
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
        raise CheckpointError(f"{folder} {what}; give the folder that save_checkpoint wrote to")
    return saves[-1]


def write_manifest(save: Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest``, with its format and its own CRC-32, and flush it to the disk. An OSError names the file."""
    whole = {"format": FORMAT, **manifest}
    try:
        (save / MANIFEST).write_text(json.dumps({**whole, "crc32": _own_crc32(whole)}), encoding="utf-8")
        sync(save / MANIFEST)
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
    if isinstance(found, int) and found != FORMAT:
        raise CheckpointError(
            f"{save / MANIFEST} has format {found}, and this version of ProTrain reads format {FORMAT}: load it with "
            "the version that wrote it"
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
    """The CRC-32 of a file's bytes. As zlib releases the GIL, several files can be checked in parallel."""
    crc32 = 0
    with _reading(path), open(path, "rb", buffering=0) as file:
        while piece := file.read(1024**2):  # a load checks several files at once, on each rank
            crc32 = zlib.crc32(piece, crc32)
    return crc32


def _remedy(save: Path) -> str:
    """What to do about the damaged ``save``: load the one before it, if there is one."""
    older = [other for other in list_saves(save.parent) if other.name < save.name]
    if older:
        return f"delete {save} to go on from {older[-1].name}, or load that folder"
    return "there is no older save beside it: put a whole copy of it back, or start anew in another folder"


def encode(value: Any, what: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """Convert ``value`` to JSON values that ``decode`` converts back exactly. Tuples and non-text keys are marked.

    Copies of tensors go to ``tensors``, if given.

    Raises:
        ValueError: it holds something that cannot be kept; the message names ``what``.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, what, tensors) for item in value]
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item, what, tensors) for item in value]}
    if isinstance(value, Counter | dict):
        if type(value) is dict and all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(item, what, tensors) for key, item in value.items()}
        kind = "__counter__" if isinstance(value, Counter) else "__dict__"
        return {kind: [[encode(key, what, tensors), encode(item, what, tensors)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, Tensor) and tensors is not None:
        key = f"{EXTRA}{len(tensors)}"
        tensors[key] = value.detach().cpu().clone().contiguous()
        return {"__tensor__": key}
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():  # a learning rate may be a 0-d tensor
        return {"__scalar__": [value.item(), str(value.dtype).removeprefix("torch.")]}
    kinds = "numbers, text, lists, dicts" + (", tensors" if tensors is not None else "")
    raise ValueError(f"{what} holds a {type(value).__name__}; a checkpoint keeps {kinds}")


def decode(value: Any, read: Callable[[str], Tensor] | None = None) -> Any:
    """What ``encode`` was given. ``read`` gives the tensors that it took, by their keys."""
    if isinstance(value, list):
        return [decode(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: decode(item, read) for key, item in value.items()}
    mark = next(iter(found), "")  # the only key of a marked value
    if mark == "__tensor__":
        assert read is not None
        return read(found[mark])
    return _MARKED[mark](found[mark]) if mark in _MARKED else found


_MARKED: dict[str, Callable[[Any], Any]] = {
    "__tuple__": tuple,
    "__bytes__": base64.b64decode,
    "__scalar__": lambda found: torch.tensor(found[0], dtype=getattr(torch, found[1])),
    "__counter__": lambda pairs: Counter(dict(pairs)),
    "__dict__": dict,
}


def random_state() -> dict[str, Any]:
    """The states of torch's CPU and CUDA generators, of Python's ``random``, and of numpy's global generator."""
    numpy_state: Any = np.random.get_state()
    generator, key, *rest = numpy_state
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in cuda],
        "python": random.getstate(),
        "numpy": (generator, key.tolist(), *rest),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set what ``random_state`` returned. CUDA devices beyond those of the save keep their states."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    for device, own in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(torch.tensor(own, dtype=torch.uint8), device)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
