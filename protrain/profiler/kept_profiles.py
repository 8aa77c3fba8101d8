"""The profiles that are kept on disk, each under a key: a digest of everything that the profile depends on.

Building a large model takes longer than planning for it. A caller who builds it from a description, and has it counted
on the meta device, makes the key from the description. If the answer is kept, that needs neither torch nor any library
of the model. ``protrain.profiler.cache`` makes the keys of models that are in memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from protrain.common.cache import cache_folder, keeps_measurements, say_unwritable
from protrain.common.records import Record

_LIBRARIES = ("torch", "triton", "transformers", "peft", "flash_attn", "liger_kernel", "bitsandbytes", "torchao")
_KEPT = 64  # the number of files kept in a folder; the oldest are deleted first
Kept = TypeVar("Kept", bound=Record)


def kept(folder: str, kind: type[Kept], key: str, make: Callable[[], Kept], use: Callable[[bool], bool] = bool) -> Kept:
    """What a ``folder`` of the cache has under ``key``. If it has nothing, ``make`` makes it, and it is kept.

    ``use`` is told whether the cache has it, and says whether it is used.
    """
    if not keeps_measurements():
        use(False)
        return make()
    path, found = cache_folder() / folder / f"{key}.json", None
    with contextlib.suppress(ValueError, OSError):  # the file is missing or has an old format
        found = kind.load(path)
        path.touch()
    if use(found is not None) and found is not None:
        return found
    made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)
        for old in sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-_KEPT]:
            old.unlink()
    except OSError as error:  # without a writable folder, the next run profiles again, and nothing else is lost
        say_unwritable(cache_folder(), error.strerror or type(error).__name__)
    return made


def key_of(facts: Any) -> str:
    """The digest of ``facts``, of the code of this package, and of the versions of Python and of the libraries."""
    versions = {name: version_of(name) for name in _LIBRARIES}
    whole = {"facts": facts, "python": platform.python_version(), "versions": versions, "code": _own_code()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:24]


@functools.cache
def _own_code() -> str:
    """A digest of this package's source files, because two builds may share a version number."""
    return digest_of(Path(__file__).parents[1].rglob("*.py"))


def digest_of(files: Iterable[Path]) -> str:
    """A digest of the contents of ``files``. One that cannot be read does not count."""
    digest = hashlib.sha256()
    for file in sorted(files):
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache  # a search for metadata takes milliseconds, and every wrap asks
def version_of(module: str) -> str:
    """The version of the package of ``module``, which need not be imported."""
    with contextlib.suppress(PackageNotFoundError):
        return version(module.replace("_", "-"))
    return "not installed"
