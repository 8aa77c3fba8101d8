"""Where ProTrain keeps what it made for this machine: compiled libraries, profiles of models and calibrations.

``PROTRAIN_CACHE`` names the folder. With "0" the folder stays where it is, but nothing that was measured is read or
kept. Compiled libraries, which are named by a hash of all that they were made of, stay in use.

This is a package of its own, because ``protrain_kernels`` imports nothing from ``protrain``, and needs torch, for which
a plan from a kept profile is not to wait.
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
    """Whether measurements may be kept and used again. ``PROTRAIN_CACHE=0`` says no."""
    return os.environ.get("PROTRAIN_CACHE") != "0"


@functools.cache
def say_unwritable(folder: Path, reason: str) -> None:
    """Warn once that nothing can be kept in ``folder``."""
    warnings.warn(
        f"{folder} cannot be written ({reason}), so everything is compiled and measured again in every run: let "
        "PROTRAIN_CACHE name a folder that can be written",
        RuntimeWarning,
        stacklevel=3,
    )
