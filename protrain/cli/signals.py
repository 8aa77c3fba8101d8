"""Signals that ask a command to stop: noted between steps, an exception where nothing else would stop it.

Commands that leave nothing to put in order need none of this: see ``protrain.common.interrupt``.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONE_REQUEST_S = 1.0  # signals no further apart ask once: a wrapper hands on what its process group got already
_LOOK_S = 0.25  # between looks for an exception that was swallowed


class Stopped(KeyboardInterrupt):
    """A signal came within :meth:`StopRequests.raised`."""


class InterruptedRun(Exception):
    """The command was told to stop and did, with everything in order; the message says how things stand."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


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
        if self._raises:
            raise Stopped
        # A terminal closes once: both the kernel and its shell tell of that, and nobody asks again by it.
        if not first and number != signal.SIGHUP:
            raise KeyboardInterrupt

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Within, the first signal is a :class:`Stopped`, also one that came before.

        Python drops what is raised in a finalizer or in the callback of a weak reference, and C code may take it for a
        missing attribute. So a :class:`Stopped` is raised again every second until the body is left, and an error that
        leaves the body after a signal becomes one: what was swallowed may be its cause.
        """
        left = threading.Event()
        # Not started by the handler: it may come while the main thread holds a lock that starting takes.
        threading.Thread(target=self._ask_again, args=(left,), name="protrain-stop", daemon=True).start()
        self._raises = True
        try:
            if self.received:
                raise Stopped
            with _without_traces_of_what_is_swallowed():
                yield
        except Exception:
            if self.received:
                raise Stopped from None
            raise
        finally:
            self._raises = False
            left.set()
            if self.received:
                self._last_s = time.monotonic()  # a signal that `_ask_again` has just sent is no request of its own

    def _ask_again(self, left: threading.Event) -> None:
        main = threading.main_thread().ident
        assert main is not None, "it runs from the start of Python"
        while not left.wait(_LOOK_S):
            if self.received and time.monotonic() - self._last_s > _ONE_REQUEST_S:
                signal.pthread_kill(main, self.received)


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


@contextmanager
def _without_traces_of_what_is_swallowed() -> Iterator[None]:
    """Python reports a dropped exception with a traceback; a :class:`Stopped` is raised again and needs none."""
    report = sys.unraisablehook

    def keep_back(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, Stopped):
            report(unraisable)

    sys.unraisablehook = keep_back
    try:
        yield
    finally:
        sys.unraisablehook = report
