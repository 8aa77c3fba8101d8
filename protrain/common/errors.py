"""The errors and warnings that users see. Each message names what is wrong and how to fix it.

A warning names the line of the user's code, where torch or a trainer stands between that and this library.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import Any

from protrain.common.tables import format_bytes

# What switches off the writes into weights that forwards of well-known modules make.
NO_WRITES = ", ".join(
    (
        "max_norm=None of an embedding",
        "config.rescale_every = 0 of RWKV",
        "vars(config)['altup_coef_clip'] = None of Gemma-3n",
    )
)


@dataclass(kw_only=True, eq=False, repr=False)
class PlanError(ValueError):
    """No plan fits, or the given plan does not.

    It states the bytes needed and available, the largest part, and a remedy.

    It is raised before any memory is allocated.
    """

    where: str  # "GPU", "device" or "host"
    needed_bytes: int
    available_bytes: int
    largest_part: str
    remedy: str
    given: bool = False  # whether the caller gave the plan
    fitting_batch: int = 0  # a smaller one for which a plan seems to fit; 0: none is known

    def __post_init__(self) -> None:
        needed, available = format_bytes(self.needed_bytes), format_bytes(self.available_bytes)
        if needed == available:
            needed, available = f"{self.needed_bytes:,} bytes", f"{self.available_bytes:,}"
        super().__init__(
            f"{'the plan does not fit' if self.given else 'no plan fits'} the {self.where} memory: "
            f"needed {needed}, available {available}; "
            f"largest part: {self.largest_part}. {self.remedy}"
        )

    def __reduce__(self) -> Any:
        return partial(PlanError, **asdict(self)), ()


class BudgetError(MemoryError):
    """A memory budget (``device_memory`` on a CPU, or ``host_memory``) would be exceeded while running."""


class MisuseError(RuntimeError):
    """The model or optimizer was used in a way that does not work. The message says what to do instead."""


class CheckpointError(ValueError):
    """A checkpoint folder is missing, incomplete or corrupt."""


_LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "sentence_transformers", "torch")
_COMMAND = "protrain.cli."
_PACKAGES = frozenset({"contextlib", "protrain", "transformers", "trl", *_LIBRARIES})


def warn_user(message: str) -> None:
    """Warn at the line where the user's code has called torch, this library or one that trains with it."""
    user_line()(message)


def user_line() -> Callable[[str], None]:
    """A function that warns at the line where the user's code is now, whenever and in whatever thread it is called.

    It is the nearest line that belongs to none of the libraries. The command line uses the library as a user does.
    """
    frame: FrameType = sys._getframe()
    while frame.f_back is not None and _is_of_library(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return lambda message: warnings.warn_explicit(message, UserWarning, *place, registry)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES and not module.startswith(_COMMAND)
