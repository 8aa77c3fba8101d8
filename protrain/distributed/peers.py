"""What the watcher of a rank knows of each other rank, and what follows from where they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from protrain.distributed.notes import NoteOf, named
from protrain.distributed.standing import Stand, waits_for_this_rank

_SHOWN = 3  # places that a warning names


class Raised(NamedTuple):
    """An exception."""

    where: str
    error: str  # its type and text, "" if they are not known, as of a backward that autograd gave up
    times: int  # how many are known since the last note, with this one

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


def absence(peers: Mapping[int, Peer], rank: int, number: int, what: str, waited_s: float) -> str:
    """For whom among its ``peers`` ``rank`` has waited in ``what``, its note of this number."""
    late = [other for other, peer in peers.items() if peer.number < number]
    raised = [peers[other].raised for other in late]
    errors = [each.error for each in raised if each is not None]
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


def mutual_wait(peers: Mapping[int, Peer], rank: int, number: int, what: str) -> str | None:
    """An error in words if others wait for ``rank`` in a collective of the script, and it for them, and None if not.

    See [Note: two that wait for each other].

    Args:
        peers: the other ranks.
        rank: of this process.
        number: of its last note.
        what: it waits in.
    """
    for peer in peers.values():
        stand = peer.stand
        if peer.number < number and stand is not None and stand.call is not None and waits_for_this_rank(stand.call):
            there = [other for other, each in peers.items() if each.number < number and each.stand == stand]
            here = sorted([rank, *(other for other, each in peers.items() if each.number == number)])
            wait = f"{'waits' if len(here) == 1 else 'wait'} for {named(there)} in {what}"
            return f"{named(there)} {_are(there)} {stand.place}, while {named(here)} {wait}"
    return None


def _are(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
