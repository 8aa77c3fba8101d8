"""Where ProTrain keeps between runs what it made for this machine: compiled libraries, profiles, calibrations.

``PROTRAIN_CACHE`` names the folder. "0" leaves the folder where it is, and nothing that was measured is read or kept;
compiled libraries, named by all that they were made of, stay in use.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

_SWITCHES = ("0", "1")


def cache_folder() -> Path:
    """``$PROTRAIN_CACHE`` where it names a folder, else ``$XDG_CACHE_HOME/protrain`` or ``~/.cache/protrain``."""
    named = os.environ.get("PROTRAIN_CACHE", "")
    if named and named not in _SWITCHES:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "protrain"


def keeps_measurements() -> bool:
    """Whether what was measured once may be used again: not with ``PROTRAIN_CACHE=0``."""
    return os.environ.get("PROTRAIN_CACHE") != "0"


@functools.cache
def say_unwritable(folder: Path, reason: str) -> None:
    """Warn, once, that nothing can be kept in ``folder`` of the cache."""
    warnings.warn(
        f"{folder} cannot be written ({reason}), so what is compiled and measured is made anew every time: let "
        "PROTRAIN_CACHE name a folder that can be",
        RuntimeWarning,
        stacklevel=3,
    )
