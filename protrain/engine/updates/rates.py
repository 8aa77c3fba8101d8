"""How fast chunks in host memory are updated in this run."""

from __future__ import annotations

from collections import deque

from protrain.engine.states.chunks import Piece

_NEWEST_SHARE = 0.2  # what the newest update counts in the rate: about the last five decide it
_FORGOTTEN_SHARE = 0.05  # how far the rate goes back to the predicted one in a step without an update: half in 14 steps
_MOST_UPDATES = 2000  # the number of updates that count for the mean


class Rate:
    """1e9 elements a second, of which the last updates count most.

    Args:
        gparams: the predicted rate, which holds until the first update.
    """

    def __init__(self, gparams: float) -> None:
        self.gparams = self._predicted = gparams
        self.updates: deque[tuple[int, float]] = deque(maxlen=_MOST_UPDATES)  # elements and seconds

    def add(self, pieces: list[Piece], seconds: float) -> None:
        """An update of ``pieces`` took ``seconds``."""
        elements = sum(part.stop - part.start for part, _ in pieces)
        measured = elements / max(seconds, 1e-9) / 1e9
        self.gparams += (measured - self.gparams) * (_NEWEST_SHARE if self.updates else 1.0)
        self.updates.append((elements, seconds))

    def forget(self) -> None:
        """No update was made in this step. The rate turns to the predicted one by and by.

        Whoever decides by the rate that an update is not worth it would otherwise never see that it has changed.
        """
        self.gparams += (self._predicted - self.gparams) * _FORGOTTEN_SHARE

    def mean_gparams(self) -> float:
        """1e9 elements a second over many of the last updates; 0 if there are none."""
        updates = self.updates.copy()  # another thread may add to it
        seconds = sum(took for _, took in updates)
        return sum(elements for elements, _ in updates) / seconds / 1e9 if seconds > 0 else 0.0

    def milliseconds(self, elements: int) -> float:
        """How long an update of ``elements`` takes."""
        return elements / max(self.gparams, 1e-9) / 1e6
