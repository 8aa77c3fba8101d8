"""Watches that all ranks stay in step. Whatever parts them raises an error on every rank, with rank and difference.

The ranks of a training make the same calls in the same order. When one of them makes another call, raises an exception
or dies, the others would wait for it in a collective for as long as their process group allows, half an hour.

    note        The main thread notes each collective before it issues it: what it is for, and its bytes. That takes
                less than a microsecond and reaches nobody.
    agreed      At the end of each backward, and in calls that all ranks must make, all exchange a hash of their notes.
                If these are the same, what was before is forgotten.
    tell        A thread sees that no new note has come for a second. Then it sends the last notes to all other ranks,
                and so it does at once if its process raises an exception or ends.
    decide      Each thread compares what it hears. If two ranks have different notes of the same number, or a rank has
                raised or ended and others wait for it, it decides what to blame, sends that to all, and aborts the
                communicators.
    raise       The main thread waits for a collective on the host in short turns. After each, and with each note, it
                looks for a decision, which it raises as a MisuseError. What waits for other ranks inside torch, such as
                the start of a process group, runs in a thread, for which the main thread waits in the same way.

The watch begins as soon as a rank has found the store in which all ranks meet, before it waits for any of them.

[Note: an error that is caught] A rank that raises an exception may catch it and go on, and so may all others, if all
raise it. So an exception alone decides nothing. It is to blame if another rank has gone further, and for some seconds
nothing new has come from the one that raised, unless the other has raised as often since they agreed.

[Note: absence] A slow loader or a cold compilation is no error. The others warn once, the late rank prints where it
stands, and the others raise an error at the timeout of the process group. One case is certain before that: rank 1 is
inside a collective of the script on the default group, such as ``dist.barrier()``, which rank 0 has not begun, and
rank 0 waits for rank 1 in the model. Torch counts what a rank has begun on a group, which tells so. Such calls alone
can be recognised from outside: a rank in ``work.wait()`` or ``loss.item()`` is like a slow one.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from protrain.common.errors import MisuseError, warn_user
from protrain.distributed.links import (
    DIED,
    REMEDY,
    Links,
    Message,
    Raised,
    State,
    begun,
    end_script_call,
    first_difference,
    named,
    script_call,
)

TICK_S = 1.0  # after so long without a note, the last ones are sent
CAUGHT_S = 5.0  # how long a rank that has raised an exception may take to go on
STUCK_S = 5.0  # how long ranks wait for each other before that is taken for certain
WARN_S = 30.0  # a wait of so long brings a warning, or half of one that may not last a minute
_EXPLAIN_S = 6.0  # how long a failed collective waits for the reason, which others may know first
_THREAD_S = 10.0  # how long the main thread waits for the watcher's, which a busy machine may hold up
_TURN_S = 0.1  # after which a wait looks for a decision, and the thread for what is to be told
_KEPT = 1024  # notes: those of a step of a large model, as a host may be as far ahead of its GPU
_ABORT_S = 5  # how long a process that got out of step waits for its communicators to be given up, before it ends
_END_S = 10  # how long it may take to end after that

WAITING = r"rank \d+ has waited"  # how the warning of a rank begins that waits for others

Result = TypeVar("Result")


class Watch:
    """The watcher of one rank.

    Args:
        rank: of this process.
        size: how many ranks there are, at least two.
        links: to the other ranks.
        timeout_s: how long a collective may take.
        abort: gives the communicators up. It is called once, when the ranks are out of step.
    """

    def __init__(self, rank: int, size: int, links: Links, *, timeout_s: float, abort: Callable[[], None]) -> None:
        self._rank = rank
        self._links = links
        self._timeout_s = timeout_s
        self._abort = abort
        self._trains = threading.get_ident()  # the thread that does
        self._number = 0
        self._agreed = 0  # a number that all ranks have come to in step
        self.notes: deque[tuple[int, str, int]] = deque(maxlen=_KEPT)  # the last since all ranks agreed
        self.trail = 0, 0  # the number of notes, and a hash of them all: the same on all ranks that are in step
        self.peers = {other: State() for other in range(size) if other != rank}  # as far as they have told
        self._raised: Raised | None = None
        self._ended = False
        self._waits_since = math.inf  # when the main thread has begun to wait for other ranks, in seconds
        self.decided: str | None = None  # why the ranks are out of step
        self._call: tuple[str, int] | None = None
        self._suspected: str | None = None  # a difference that the last comparison has found
        self._passes = 0  # how often the thread has heard and told
        self._deciding = threading.Lock()
        if not _watches:
            sys.excepthook = partial(_report_uncaught, sys.excepthook)
        _watches.add(self)
        self._thread = threading.Thread(target=self._run, name="protrain watcher", daemon=True)
        self._thread.start()

    # -- the main thread -----------------------------------------------------------------------------------------------

    def note(self, what: str, size_bytes: int = 0) -> None:
        """This rank is about to do ``what``, which all ranks do next. MisuseError if they are out of step."""
        if self.decided is not None:
            self.refuse(self.decided)
        number = self._number + 1
        self.trail = number, zlib.crc32(f"{what}, {size_bytes}".encode(), self.trail[1])
        self.notes.append((number, what, size_bytes))
        self._number = number

    def settle(self, timeout_s: float = _THREAD_S) -> None:
        """Let the thread hear all that has come until now, and tell the others what is new."""
        end, passes = monotonic() + timeout_s, self._passes
        is_other = self._thread.is_alive() and threading.current_thread() is not self._thread  # it is not in a fork
        while is_other and self._passes < passes + 2 and monotonic() < end:
            sleep(_TURN_S / 10)

    def agreed(self) -> None:
        """Forget notes and errors until now, as all ranks have come to the last note in step."""
        self._agreed, self._raised = self._number, None
        self.notes.clear()

    def wait(self, work: dist.Work, *, timeout_s: float = math.inf, absent: str = "") -> None:
        """Wait for ``work`` of the last note. MisuseError if the ranks are out of step, or others do not come.

        Args:
            work: on the host.
            timeout_s: how long to wait, if that is less than the timeout of the process group.
            absent: a remedy for ranks that do not come, because their script may not make the call.
        """
        try:
            self._wait_until(partial(_is_done, work), timeout_s=timeout_s, absent=absent)
        except RuntimeError as error:
            never_free(work)
            self.fail(error)

    def during(self, what: str, action: Callable[[], Result]) -> Result:
        """Run ``action`` in a thread, and return its result. It waits for all ranks, and nothing else ends it.

        MisuseError if the ranks are out of step, or others do not come. The thread is left alone then.
        """
        self.note(what)
        found: Future[Result] = Future()

        def act() -> None:
            try:
                found.set_result(action())
            except BaseException as error:
                found.set_exception(error)

        thread = threading.Thread(target=act, name=f"protrain: {what}", daemon=True)
        thread.start()
        try:
            self._wait_until(lambda: bool(wait([found], _TURN_S).done))
            return found.result()
        except BaseException as error:  # Ctrl-C, too
            _left.append(thread)
            self.fail(error)

    def _wait_until(self, is_done: Callable[[], bool], *, timeout_s: float = math.inf, absent: str = "") -> None:
        """Wait until ``is_done``, which takes a turn, says so. The arguments are those of ``wait``."""
        limit_s = min(timeout_s, self._timeout_s)
        warn_s = min(WARN_S, limit_s / 2)
        self._waits_since = monotonic()
        try:
            while not is_done():
                waited_s = monotonic() - self._waits_since
                if self.decided is not None or waited_s > limit_s:
                    self.refuse(f"{self._absence(waited_s)}, and gives up. {absent or REMEDY}")
                if waited_s > warn_s:
                    warn_s = math.inf
                    warn_user(f"{self._absence(waited_s)}, and goes on waiting. {absent}".rstrip(". "))
        finally:
            self._waits_since = math.inf

    def raised(self, error: BaseException | None, where: str = "") -> None:
        """Record that an exception leaves ``where`` on this rank. See [Note: an error that is caught]."""
        if isinstance(error, RuntimeError) and not isinstance(error, MisuseError):
            self.settle()  # torch itself only knows that a rank is gone from a collective
            reasons = [
                f"rank {rank} has raised an exception{peer.raised.place}: {peer.raised.error}"
                for rank, peer in self.peers.items()
                if peer.raised is not None and peer.raised.number >= self._agreed
            ]
            note = f"The ranks are out of step: {self.decided or '; '.join(reasons)}"
            if (self.decided or reasons) and note not in getattr(error, "__notes__", []):
                error.add_note(note)
        known = self._raised or Raised(-1, "", "", 0)
        is_told = known.number == self._number  # of a failed backward autograd tells before or after its error is known
        unknown = "its script has caught it, and autograd does not tell what it was. See what that rank printed"
        text = f"{type(error).__name__}: {error}" if error is not None else known.error if is_told else unknown
        place = f" in {where}" if where else known.place if is_told else ""
        self._raised = Raised(self._number, place, text, known.times + (error is not None))

    def end(self) -> None:
        """End the watch, as this rank takes no part any more. Returns when the others were told."""
        error = sys.exception()
        if error is not None:  # which a script has not left yet that ends its process group in a ``finally``
            self.raised(error)
        self._ended = True
        self.settle(TICK_S)

    def fail(self, error: BaseException) -> NoReturn:
        """Find out why the collective of the last note has failed, and raise that as a MisuseError."""
        if isinstance(error, MisuseError) or not isinstance(error, RuntimeError):
            raise error
        self._waits_since = -math.inf  # it need not wait any longer
        end = monotonic() + _EXPLAIN_S
        while self.decided is None and monotonic() < end:
            sleep(0.05)
        self.refuse(f"rank {self._rank} failed in {self._place(self._number)}: {error}")

    def refuse(self, reason: str) -> NoReturn:
        """Raise a MisuseError: the ranks are out of step for ``reason``, or for what was decided before.

        It is raised once the others were told, as a script may catch it and train anew with them.
        """
        self._decide(reason)
        self.settle()
        raise MisuseError(self.decided or reason) from None

    def _absence(self, waited_s: float) -> str:
        """Say in words for which ranks this one waits."""
        late = [rank for rank, peer in self.peers.items() if max(peer.number, self._agreed) < self._number]
        return (
            f"rank {self._rank} has waited {waited_s:.0f} s for {named(late) if late else 'other ranks'} in "
            f"{self._place(self._number)} (collective {self._number})"
        )

    def _place(self, number: int) -> str:
        return next((what for noted, what, _ in list(self.notes) if noted == number), "a later collective")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        moved_s, next_tick = monotonic(), monotonic() + TICK_S
        told, seen = State(), 0
        call: tuple[str, int] | None = None
        while True:
            for rank, message in self._links.receive(_TURN_S):
                self._hear(rank, message)
            paused, ticks = False, monotonic() >= next_tick
            if ticks:
                next_tick, paused, seen = monotonic() + TICK_S, seen == self._number, self._number
                is_absent = paused and self._waits_since == math.inf
                before, call = call, script_call(self._trains) if is_absent else None
                self._call = call if call == before else None  # an asynchronous one is left at once
                if not is_absent:
                    moved_s = monotonic()
                elif monotonic() - moved_s > WARN_S and any(peer.number > seen for peer in self.peers.values()):
                    moved_s = math.inf
                    print(f"Other ranks wait for rank {self._rank}, which is here:", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(2)
            state = State(self._number, self._raised, self._ended, self.decided, self._call)
            if state != told and (paused or state[1:] != told[1:]):
                told = state
                self._links.send([*state[:5], [each for each in list(self.notes) if each[0] <= state.number]])
            self._judge(compares=ticks)
            self._passes += 1

    def _hear(self, rank: int, message: Message | None) -> None:
        peer = self.peers[rank]
        if message is None:
            self.peers[rank] = peer._replace(gone=True)
            if not peer.ended:
                self._decide(DIED.format(rank))
        elif message:
            state = State(*message)
            raised = state.raised and Raised(*state.raised)
            self.peers[rank] = state._replace(raised=raised, gone=peer.gone, heard=monotonic())
            self._decide(state.decided)

    def _judge(self, *, compares: bool) -> None:
        """Decide who is to blame, if anyone is."""
        if compares:
            notes = {rank: peer.notes for rank, peer in self.peers.items()} | {self._rank: list(self.notes)}
            before, self._suspected = self._suspected, first_difference(notes)
            self._decide(before if before == self._suspected else None)  # all ranks had a tick to tell their notes
        for rank, peer in self.peers.items():
            self._decide(self._blame(rank, peer))

    def _blame(self, rank: int, peer: State) -> str | None:
        """An error in words if this rank can't go on, as ``rank`` has raised, has ended, or waits for it."""
        waited_s, number = monotonic() - self._waits_since, max(peer.number, self._agreed)
        raised, own = peer.raised if peer.raised is not None and peer.raised.number == number else None, self._raised
        if self._number > number:
            here = f"while rank {self._rank} went on to {self._place(number + 1)}"
        elif peer.ended and self._call is not None and (peer.gone or raised is not None):
            here = f"while rank {self._rank} is in torch.distributed.{self._call[0]}()"
        elif peer.ended and self._number == number and waited_s > CAUGHT_S:
            here = f"while rank {self._rank} waits in {self._place(number)}"
        else:
            return None
        # This rank may have raised as often, and caught it as the other may.
        alike = raised is not None and own is not None and own.times >= raised.times
        if raised is not None and (peer.ended or (not alike and monotonic() - peer.heard > CAUGHT_S)):
            return f"rank {rank} has raised an exception{raised.place}, {here}: {raised.error}"
        if peer.ended:
            return f"rank {rank} has ended, {here}. {REMEDY}"
        if peer.call is not None and waited_s > STUCK_S and peer.call[1] > begun():
            return f"rank {rank} is in torch.distributed.{peer.call[0]}(), {here}. {REMEDY}"
        return None

    def _decide(self, reason: str | None) -> None:
        """Declare the ranks out of step for ``reason``, unless it is None or one is known already."""
        with self._deciding:
            if reason is None or self.decided is not None or self._ended:
                return
            self.decided = reason  # before a thread comes free that waits for the GPU
        _give_up(self._abort)
        if self._call is not None:
            _give_up(end_script_call)


def _is_done(work: dist.Work) -> bool:
    """Whether ``work`` ends within a turn. An error in it is raised."""
    try:
        work.wait(timedelta(seconds=_TURN_S))
    except RuntimeError:
        if not work.is_completed():  # the turn is over
            return False
        work.wait()  # raises what went wrong, or else it has ended just now
    return True


# -- the end of a process whose ranks are out of step ------------------------------------------------------------------

_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_aborting: list[threading.Thread] = []  # which give communicators up
_left: list[threading.Thread] = []  # which wait inside torch for ranks that may never come


def _give_up(abort: Callable[[], None]) -> None:
    """Call ``abort``, which gives communicators up. It is not waited for: NCCL may wait there for other ranks."""
    thread = threading.Thread(target=abort, name="protrain abort", daemon=True)
    thread.start()
    _aborting.append(thread)


def never_free(thing: object) -> None:
    """Keep ``thing``, a collective of gloo that was given up or its process group, until the process is gone.

    A thread of the group works on the collective until all ranks have come, or for the timeout of the group. To free
    either would wait for that thread, at the latest when Python ends.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@atexit.register
def _end_all_the_same() -> None:
    """Bound how long a process that got out of step takes to end.

    CUDA and NCCL free their memory at the very end, after Python, and may wait there without a limit for a collective
    that other ranks never came to. The system's alarm ends the process then, whatever waits.

    A thread that comes back from a wait inside torch while Python ends would abort the process. So if there is one, a
    process that an error ends leaves now.
    """
    if any(watch.decided is not None for watch in _watches) and threading.current_thread() is threading.main_thread():
        for thread in list(_aborting):
            thread.join(_ABORT_S)
        if hasattr(sys, "last_value") and any(thread.is_alive() for thread in _left):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_END_S)


def _report_uncaught(before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Let all watches hear of an exception that ends the process."""
    for watch in list(_watches):
        watch.raised(error)
    before(kind, error, trace)
