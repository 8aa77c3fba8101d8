"""What the watcher of a rank knows of each other rank, and what follows from where they stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from protrain.distributed.notes import REMEDY, NoteOf, named
from protrain.distributed.standing import Stand, waits_for_this_rank

_SHOWN = 3  # places that a warning names


class Raised(NamedTuple):
    """An exception."""

    where: str
    error: str  # its type and text, "" if they are not known, as of a backward that autograd gave up
    times: int  # how many are known since the last note, with this one

    @property
    def place(self) -> str:
        """Where, in words that follow "an exception"."""
        return f" in {self.where}" if self.where else ""

    def as_often_as(self, other: Raised) -> bool:
        """Whether this one was raised at the place of ``other``, and there were no fewer before it."""
        return self.where == other.where and self.times >= other.times


@dataclass
class Peer:
    """The knowledge of this rank about another one."""

    number: int = 0  # of its last note
    notes: dict[int, NoteOf] = field(default_factory=dict)  # its last ones, by number
    raised: Raised | None = None  # an exception after which it has not gone on
    stand: Stand | None = None  # where it pauses since that note, unless it waits for other ranks in the model
    ended: bool = False  # it takes no part any more
    gone: bool = False  # its process has ended
    heard: float = 0.0  # when its last note came, in seconds


class Own(NamedTuple):
    """Where this rank is."""

    rank: int
    number: int  # of its last note
    raises: Mapping[int, Raised]  # its exceptions, by the number of the last note before them
    raised_at: float  # the last of them, in seconds
    stand: Stand | None  # where it pauses, unless it waits for other ranks in the model
    waited_s: float  # for others in the model
    remedy: str  # for ranks that do not come


def blame(
    peers: Mapping[int, Peer],
    own: Own,
    members: Sequence[int],
    place: Callable[[int], str],
    *,
    caught_s: float,
    stuck_s: float,
) -> str | None:
    """An error in words if a rank can't go on, as another has raised, has ended, or waits for it. None: there is none.

    Args:
        peers: the other ranks.
        own: where this rank is.
        members: the number of each rank in the default group.
        place: what the note of a number is for.
        caught_s: how long a rank that has raised an exception may take to go on.
        stuck_s: how long ranks wait for each other before that is taken for certain.
    """
    for rank, peer in peers.items():
        raised = peer.raised
        if own.number > peer.number:
            others = f", while rank {own.rank} went on to {place(peer.number + 1)}"
        elif own.number < peer.number or not peer.ended:
            continue
        elif own.waited_s > caught_s:
            others = f", while rank {own.rank} waits in {place(peer.number)}"
        elif (peer.gone or raised is not None) and own.stand is not None and _needs(own.stand, members[rank]):
            others = f", while rank {own.rank} is {own.stand.place}"
        else:
            continue
        # This rank has raised there, too, and caught it as the other may.
        alike = raised is not None and _has_raised(own.raises.get(peer.number), raised)
        if raised is not None and (peer.ended or (not alike and monotonic() - peer.heard > caught_s)):
            return f"rank {rank} has raised an exception{raised.place}{others}: {raised.error or '?'}"
        if peer.ended:
            return f"rank {rank} has ended{others}. {own.remedy if own.waited_s > 0 else REMEDY}"
    raised = own.raises.get(own.number)
    if raised is not None and monotonic() - own.raised_at > caught_s:
        for rank, peer in peers.items():
            stand = peer.stand
            if peer.number == own.number and not _has_raised(peer.raised, raised) and _waits_in_call(stand):
                said = f"rank {own.rank} has raised an exception{raised.place}, while rank {rank}"
                return f"{said} is {stand and stand.place}: {raised.error or '?'}"
    return _mutual_wait(peers, own, place(own.number)) if own.waited_s > stuck_s else None


def first_raised(peers: Mapping[int, Peer]) -> str | None:
    """The exception of the rank that has raised first, of those that have not gone on: a sentence."""
    raised = [(peer.heard, rank, peer.raised) for rank, peer in peers.items() if peer.raised is not None]
    if not raised:
        return None
    _, rank, first = min(raised)
    return f"Rank {rank} raised an exception{first.place} before that: {first.error or '?'}"


def _has_raised(one: Raised | None, other: Raised) -> bool:
    return one is not None and one.as_often_as(other)


def _needs(stand: Stand, member: int) -> bool:
    """Whether a rank that stands there is in a collective of the script that ``member`` must come to."""
    return stand.call is not None and member in stand.call.needed


def _waits_in_call(stand: Stand | None) -> bool:
    """Whether a rank that stands there is in a collective of the script that this rank has not begun."""
    return stand is not None and stand.call is not None and waits_for_this_rank(stand.call)


def absence(peers: Mapping[int, Peer], rank: int, number: int, what: str, waited_s: float) -> str:
    """For whom among its ``peers`` ``rank`` has waited in ``what``, its note of this number.

    An exception of theirs is named if they told of it after the note before that. Since an earlier one they may have
    gone on, and have not told yet.
    """
    late = [other for other, peer in peers.items() if peer.number < number]
    raised = [peers[other].raised for other in late if peers[other].number == number - 1]
    errors = [each.error or f"an exception{each.place}" for each in raised if each is not None]
    return (
        f"rank {rank} has waited {waited_s:.0f} s for {named(late) if late else 'other ranks'} in {what} "
        f"(collective {number}){f' after {errors[0]}' if errors else ''}"
    )


def whereabouts(peers: Mapping[int, Peer], number: int) -> str:
    """Where the ranks stand that have not come to the note ``number``, as far as it is known: sentences, or nothing."""
    ranks_at: dict[str, list[int]] = {}
    for rank, peer in peers.items():
        stand = peer.stand  # the watcher may change it meanwhile
        if peer.number < number and stand is not None:
            ranks_at.setdefault(stand.place, []).append(rank)
    known = [f"{named(ranks)} {_are(ranks)} {place}. " for place, ranks in ranks_at.items()]
    return "".join(each[0].upper() + each[1:] for each in known[:_SHOWN])


def _mutual_wait(peers: Mapping[int, Peer], own: Own, what: str) -> str | None:
    """An error in words if others wait for this rank in a collective of the script, and it for them in ``what``.

    See [Note: two that wait for each other].
    """
    for peer in peers.values():
        stand = peer.stand
        if peer.number < own.number and stand is not None and _waits_in_call(stand):
            there = [other for other, each in peers.items() if each.number < own.number and each.stand == stand]
            here = sorted([own.rank, *(other for other, each in peers.items() if each.number == own.number)])
            wait = f"{'waits' if len(here) == 1 else 'wait'} for {named(there)} in {what}"
            return f"{named(there)} {_are(there)} {stand.place}, while {named(here)} {wait}. {own.remedy}"
    return None


def _are(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
