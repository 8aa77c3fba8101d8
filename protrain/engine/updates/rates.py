"""How fast chunks in host memory are updated in this run."""

from __future__ import annotations

from protrain.engine.states.chunks import Piece

_WEIGHT = 0.2  # of the newest update: about the last five count


class Rate:
    """1e9 elements a second, of which the last updates count most.

    Args:
        gparams: the predicted rate, which holds until the first update.
    """

    def __init__(self, gparams: float) -> None:
        self.gparams = gparams
        self._is_measured = False

    def add(self, pieces: list[Piece], seconds: float) -> None:
        """An update of ``pieces`` took ``seconds``."""
        measured = sum(part.stop - part.start for part, _ in pieces) / max(seconds, 1e-9) / 1e9
        self.gparams += (measured - self.gparams) * (_WEIGHT if self._is_measured else 1.0)
        self._is_measured = True

    def milliseconds(self, elements: int) -> float:
        """How long an update of ``elements`` takes."""
        return elements / max(self.gparams, 1e-9) / 1e6
