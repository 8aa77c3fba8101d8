"""Watches that all ranks stay in step. Whatever parts them raises an error on every rank, with rank and difference.

The ranks of a training make the same calls in the same order. When one of them makes another call, raises an exception
or dies, the others would wait for it in a collective for as long as their process group allows, half an hour.

    note        The main thread notes each collective before it issues it: what it is for, and its bytes. That takes
                less than a microsecond and reaches nobody.
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
raise it. So an exception alone decides nothing. It is to blame if another rank has gone further, or waits for it in a
collective of the script, and for some seconds nothing new has come from the one that raised, unless the other has
raised as often at the same place. If it goes on with another call, its notes tell, and name the exception.

[Note: absence] A slow loader or a cold compilation is no error. The others warn once, with the place where that rank
stands, and raise an error at the timeout of the process group. They do so within seconds if that rank in turn waits for
them: see [Note: two that wait for each other] in ``standing.py``.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch.distributed as dist

from protrain.common.errors import MisuseError
from protrain.common.warned import warn_user
from protrain.distributed.endings import give_up, leave_alone, never_free, see_to_the_end
from protrain.distributed.links import Links
from protrain.distributed.notes import REMEDY, by_number, first_difference, said
from protrain.distributed.peers import Own, Peer, Raised, absence, blame, first_raised, whereabouts
from protrain.distributed.standing import Stand, end_call, stand_of

TICK_S = 1.0  # after so long without a note, the last ones are sent
CAUGHT_S = 5.0  # how long a rank that has raised an exception may take to go on
STUCK_S = 5.0  # how long ranks wait for each other before that is taken for certain
WARN_S = 30.0  # a wait of so long brings a warning
CALL_S = 8.0  # so does one for ranks that may not have made the call at all
_EXPLAIN_S = 6.0  # how long a failed collective waits for the reason, which others may know first
_THREAD_S = 10.0  # how long the main thread waits for the watcher's, which a busy machine may hold up
_TURN = timedelta(seconds=0.2)  # of a wait
_KEPT = 1024  # notes: those of a step of a large model, as a host may be as far ahead of its GPU

Result = TypeVar("Result")

WAITING = r"rank \d+ has waited"  # how the warning of a rank begins that waits for others
# The number of the last note, an exception after it, whether the process has ended, and who is to blame.
State: TypeAlias = tuple[int, Raised | None, bool, str | None]


class Watch:
    """The watcher of one rank.

    Args:
        rank: of this process.
        members: the numbers of all ranks in the default group, of at least two.
        links: to the other ranks.
        timeout_s: how long a collective may take.
        abort: gives the communicators up. It is called once, when the ranks are out of step.
    """

    def __init__(
        self, rank: int, members: Sequence[int], links: Links, *, timeout_s: float, abort: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._members = members
        self._links = links
        self._timeout_s = timeout_s
        self._abort = abort
        self._process = os.getpid()
        self._trains = threading.get_ident()  # the thread that does
        self._number = 0
        self._notes: deque[tuple[int, str, int, str]] = deque(maxlen=_KEPT)
        self._checksums: dict[str, int] = {}
        self._trail = 0
        self._peers = {other: Peer() for other in range(len(members)) if other != rank}
        self._raises: dict[int, Raised] = {}  # own exceptions, by the number of the last note before them
        self._raised_at = 0.0  # the last of them, in seconds
        self._ended = False
        self._waits_since = math.inf  # when the main thread has begun to wait for other ranks, in seconds
        self._remedy = REMEDY  # for ranks that do not come
        self._decided: str | None = None
        self._told: State | None = self._state  # what was sent last. None: a rank has come that has heard nothing
        self._stand: Stand | None = None  # of this rank, as the others know it
        self._news = False  # whether there may be notes that were not compared
        self._suspected: str | None = None  # a difference that the last comparison has found
        self._asked = self._answered = 0  # how often the thread was asked to hear what has come, and did
        self._at_work = threading.Condition()  # notified when the thread has told or heard
        see_to_the_end(self)
        self._thread = threading.Thread(target=self._run, name="protrain watcher", daemon=True)
        self._thread.start()

    # -- the main thread -----------------------------------------------------------------------------------------------

    def note(self, what: str, size_bytes: int = 0) -> None:
        """This rank is about to do ``what``, which all ranks do next. MisuseError if they are out of step."""
        if self._decided is not None:
            self._raise()
        checksum = self._checksums.get(what)
        if checksum is None:
            checksum = self._checksums[what] = zlib.crc32(what.encode())
        self._trail = hash((self._trail, checksum, size_bytes))  # of integers, which is the same in every process
        before = self._raises.get(self._number)
        number = self._number + 1
        self._notes.append((number, what, size_bytes, before.error if before is not None else ""))
        self._number = number

    @property
    def is_out_of_step(self) -> bool:
        """Whether it is decided that the ranks are out of step."""
        return self._decided is not None

    def is_gone(self, rank: int) -> bool:
        """Whether the process of another rank has ended."""
        return rank != self._rank and self._peers[rank].gone

    def hear(self) -> None:
        """Let the thread hear all that has come until now."""
        if os.getpid() == self._process:
            with self._at_work:
                self._asked = asked = self._asked + 1
                self._links.wake()
                self._at_work.wait_for(lambda: self._answered >= asked, timeout=_THREAD_S)

    @property
    def trail(self) -> tuple[int, int]:
        """The number of notes so far, and a hash of them all: the same on all ranks that are in step."""
        return self._number, self._trail

    @property
    def notes(self) -> list[tuple[int, str, int, str]]:
        """The last notes: number, what, bytes, and the error that was caught before."""
        return list(self._notes)

    def agreed(self, number: int) -> None:
        """All ranks have the same notes up to this ``number``: neither those nor errors before them part the ranks."""
        self._notes = deque((each for each in self._notes if each[0] > number), maxlen=_KEPT)

    def wait(self, work: dist.Work, *, timeout_s: float = math.inf, absent: str = "") -> None:
        """Wait for ``work`` of the last note. MisuseError if the ranks are out of step, or others do not come.

        Args:
            work: on the host.
            timeout_s: how long to wait, if that is less than the timeout of the process group.
            absent: a remedy for ranks that do not come, because their script may not make the call.
        """
        try:
            self._wait_until(partial(_is_done, work), timeout_s=timeout_s, absent=absent)
        except MisuseError:
            never_free(work)
            raise
        except RuntimeError as error:
            self.fail(error)

    def during(self, what: str, action: Callable[[], Result]) -> Result:
        """What ``action`` returns, which waits for all ranks in a way that nothing else ends. It runs in a thread.

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
            self._wait_until(lambda: bool(wait([found], _TURN.total_seconds()).done))
        except BaseException:  # Ctrl-C, too
            leave_alone(thread)
            raise
        try:
            return found.result()
        except MisuseError:
            raise
        except RuntimeError as error:
            self.fail(error)

    def _wait_until(self, is_done: Callable[[], bool], *, timeout_s: float = math.inf, absent: str = "") -> None:
        """Wait until ``is_done``, which takes a turn, says so. The arguments are those of ``wait``."""
        limit_s = min(timeout_s, self._timeout_s)
        warn_s = CALL_S if absent else WARN_S
        self._remedy = absent or REMEDY
        self._waits_since, warned = monotonic(), False
        try:
            while not is_done():
                waited_s = monotonic() - self._waits_since
                if self._decided is None and waited_s > limit_s:
                    self._decide(f"{self._absence(waited_s)}, and gives up. {self._remedy}")
                if self._decided is not None:
                    self._raise()
                if not warned and waited_s > warn_s:
                    warned, where = True, whereabouts(self._peers, self._number)
                    warn_user(f"{self._absence(waited_s)}, and goes on waiting. {where}{absent}".rstrip(". "))
        finally:
            self._waits_since = math.inf

    def raised(self, error: BaseException | None, where: str = "") -> None:
        """An exception leaves ``where`` on this rank. See [Note: an error that is caught]."""
        if os.getpid() != self._process:
            return
        if isinstance(error, RuntimeError) and not isinstance(error, MisuseError):
            self._explain(error)
        if self._decided is not None:
            return
        known, mark = self._state[1] or Raised("", "", 0), f"protrain watch {id(self)}"
        if error is None:
            if known.where or known.error:  # the same one, of which a failed backward tells before or after it is known
                return
            self._raises[self._number] = Raised(where, "", 0)
        else:
            if vars(error).get(mark) == self._number:  # it leaves one context after another
                return
            vars(error)[mark] = self._number
            text = f"{type(error).__name__}: {error}"
            self._raises[self._number] = Raised(where or known.where, text, known.times + 1)
        self._raised_at = monotonic()
        if len(self._raises) > _KEPT:
            del self._raises[min(self._raises)]
        self._links.wake()

    def end(self) -> None:
        """This rank takes no part any more. Returns when the others were told."""
        if os.getpid() != self._process:
            return
        error = sys.exception()
        if error is not None:  # which a script has not left yet that ends its process group in a ``finally``
            self.raised(error)
        with self._at_work:
            self._ended = True
            self._links.wake()
            if threading.current_thread() is not self._thread:
                self._at_work.wait_for(lambda: self._told == self._state, timeout=TICK_S)

    def fail(self, error: RuntimeError) -> NoReturn:
        """The collective of the last note has failed: find out why, and raise that as a MisuseError."""
        self._waits_since = -math.inf  # it need not wait any longer
        end = monotonic() + _EXPLAIN_S
        while self._decided is None and monotonic() < end:
            sleep(0.05)
        self.refuse(f"rank {self._rank} failed in {self._place(self._number)}: {error}")

    def refuse(self, reason: str) -> NoReturn:
        """Raise a MisuseError: the ranks are out of step for ``reason``, or for what was decided before."""
        self._decide(reason)
        if self._decided is not None:
            self._raise()
        raise MisuseError(reason) from None

    def _raise(self) -> NoReturn:
        """Raise what is decided, once the others were told: a script may catch it and train anew with them."""
        with self._at_work:
            self._at_work.wait_for(lambda: self._told is not None and self._told[3] is not None, timeout=_THREAD_S)
        raise MisuseError(self._decided) from None

    def _explain(self, error: RuntimeError) -> None:
        """Note at ``error`` what others have told: torch itself only knows that a rank is gone from a collective."""
        self.hear()
        note = f"The ranks are out of step: {self._decided}" if self._decided is not None else first_raised(self._peers)
        if note is not None and note not in getattr(error, "__notes__", []):
            error.add_note(note)

    def _absence(self, waited_s: float) -> str:
        """Who waits for whom."""
        return absence(self._peers, self._rank, self._number, self._place(self._number), waited_s)

    def _place(self, number: int) -> str:
        return said(by_number(self.notes), number)

    # -- the thread ----------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> State:
        """What others should know."""
        number = self._number
        return number, self._raises.get(number), self._ended, self._decided

    def _run(self) -> None:
        seen, next_tick = 0, monotonic() + TICK_S
        stand: Stand | None = None
        while True:
            asked = self._asked
            wait_s = 0.0 if asked != self._answered else max(0.0, next_tick - monotonic())
            if any(peer.ended for peer in self._peers.values()):  # so a launcher may end this process soon
                wait_s = min(wait_s, _TURN.total_seconds())
                self._judge(compares=False)
            for rank, message in self._links.receive(wait_s):
                self._hear(rank, message)
            with self._at_work:
                self._answered = asked
                self._at_work.notify_all()
            state, paused, ticks = self._state, False, monotonic() >= next_tick
            if ticks:
                paused, seen, next_tick = seen == state[0], state[0], monotonic() + TICK_S
            if paused or self._told is None or state[1:] != self._told[1:]:
                if state != self._told:
                    self._tell(state)
                self._judge()
            if ticks:
                is_absent = paused and self._waits_since == math.inf
                before, stand = stand, stand_of(self._trains) if is_absent else None
                told = stand if stand == before else None
                if told != self._stand:
                    self._stand = told
                    self._links.send({"stand": told})

    def _tell(self, state: State) -> None:
        number, raised, ended, decided = state
        notes = [each for each in self.notes if each[0] <= number]
        self._links.send({"number": number, "notes": notes, "raised": raised, "ended": ended, "decided": decided})
        self._stand = None  # which the others forget with each new state
        self._news = True
        with self._at_work:
            self._told = state
            self._at_work.notify_all()

    def _hear(self, rank: int, message: Mapping[str, Any] | None) -> None:
        peer = self._peers[rank]
        if message is None:
            peer.gone = True
            if not peer.ended:
                self._decide(f"rank {rank} has died: its process was killed or crashed. See what it printed last")
            return
        if not message:
            self._told = None
            return
        if "unreachable" in message:
            self._decide(f"rank {self._rank} cannot connect to rank {rank} at {message['unreachable']}")
            return
        if "stand" in message:
            peer.stand = Stand.of_message(message["stand"])
            return
        raised, peer.stand = message["raised"], None
        peer.number, peer.ended, peer.raised = message["number"], message["ended"], raised and Raised(*raised)
        peer.notes, peer.heard, self._news = by_number(message["notes"]), monotonic(), True
        if message["decided"] is not None:
            self._decide(message["decided"])

    def _judge(self, *, compares: bool = True) -> None:
        """Decide who is to blame, if anyone is."""
        if self._decided is not None:
            return
        if self._news and compares:
            known = {rank: peer.notes for rank, peer in self._peers.items()} | {self._rank: by_number(self.notes)}
            difference = first_difference(known)
            if difference is not None and difference == self._suspected:  # all ranks had a tick to tell their notes
                self._decide(difference)
                return
            self._suspected = difference
            self._news = difference is not None
        waited_s = monotonic() - self._waits_since
        own = Own(self._rank, self._number, self._raises, self._raised_at, self._stand, waited_s, self._remedy)
        if reason := blame(self._peers, own, self._members, self._place, caught_s=CAUGHT_S, stuck_s=STUCK_S):
            self._decide(reason)

    def _decide(self, reason: str) -> None:
        with self._at_work:
            if self._decided is not None or self._ended:
                return
            self._decided = reason  # before a thread comes free that waits for the GPU
        give_up(self._abort)
        call = self._stand and self._stand.call
        if call is not None:
            give_up(partial(end_call, call))
        self._links.wake()


def _is_done(work: dist.Work) -> bool:
    """Whether ``work`` ends within a turn. An error in it is raised."""
    try:
        work.wait(_TURN)
    except RuntimeError:
        if not work.is_completed():  # the turn is over
            return False
        work.wait()  # raises what went wrong, or else it has ended just now
    return True
