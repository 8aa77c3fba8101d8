"""The errors that users see. Each message names what is wrong and how to fix it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
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
