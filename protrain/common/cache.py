"""Where ProTrain keeps what it measured on this machine: profiles of models, and calibrations.

``PROTRAIN_CACHE`` names the folder. With "0" the folder stays where it is, but nothing that was measured is read or
kept. ``protrain_kernels`` keeps its compiled libraries in the same folder.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path


def cache_folder() -> Path:
    """``$PROTRAIN_CACHE`` where it names a folder, else ``$XDG_CACHE_HOME/protrain`` or ``~/.cache/protrain``."""
    named = os.environ.get("PROTRAIN_CACHE", "")
    if named not in ("", "0", "1"):
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
        f"{folder} cannot be written ({reason}), so everything is measured again in every run: let "
        "PROTRAIN_CACHE name a folder that can be written",
        RuntimeWarning,
        stacklevel=3,
    )
