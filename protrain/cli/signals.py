"""Signals that ask a run to stop: noted between steps, an exception where nothing else would stop it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONE_REQUEST_S = 1.0  # signals no further apart ask once: a wrapper hands on what its process group got already


class Stopped(KeyboardInterrupt):
    """A signal came within :meth:`StopRequests.raised`."""


class StopRequests:
    """The signals that came; asked a second time the run stops at once."""

    def __init__(self) -> None:
        self.received = 0  # the first signal, or 0
        self._last_s = 0.0  # when the newest one that counts came
        self._raises = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        now_s = time.monotonic()
        first = not self.received
        if not first and now_s - self._last_s < _ONE_REQUEST_S:
            return
        self._last_s = now_s
        self.received = self.received or number
        if self._raises:  # once more where the first was swallowed, as finalizers swallow what is raised in them
            raise Stopped
        # A terminal closes once: both the kernel and its shell tell of that, and nobody asks again by it.
        if not first and number != signal.SIGHUP:
            raise KeyboardInterrupt

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Within, the first signal is a :class:`Stopped`, also one that came before."""
        self._raises = True
        try:
            if self.received:
                raise Stopped
            yield
        finally:
            self._raises = False


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Notes Ctrl-C, SIGTERM and a closed terminal. A signal that is ignored stays so: nohup and scripts rely on it."""
    requests = StopRequests()
    heard = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, requests.receive) for number in heard}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
