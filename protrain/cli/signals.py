"""Signals that ask a run to stop: noted between steps, an exception where nothing else would stop it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal came within :meth:`StopRequests.raised`."""


class StopRequests:
    """The signals that came; the second one stops at once."""

    def __init__(self) -> None:
        self.received = 0  # the first signal, or 0
        self._raises = False
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if number == signal.SIGHUP:
            self._leave_closed_terminals()
        if self.received:
            raise KeyboardInterrupt
        self.received = number
        if self._raises:
            raise Stopped

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

    def _leave_closed_terminals(self) -> None:
        """What cannot be written to a terminal that is gone must not stop the save."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


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
