"""Connections between all ranks, beside those of their process groups, and what their watchers tell each other there.

A connection tells of the death of a process: the kernel closes it within milliseconds, whatever killed the process. A
message that was sent before arrives before that. So nobody needs heartbeats, or a threshold after which silence means
death, which a slow machine would cross.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist

from protrain.common.errors import MisuseError

DIED = "rank {} has died: its process was killed or crashed. See what it printed last"
STORE_IS_GONE = "the process has ended that has the store of all ranks, which is rank 0 or the launcher"

REMEDY = (
    "All ranks must make the same calls in the same order, and have equally many batches: only what is done with their "
    "results may stand under `if rank == 0`"
)

Message: TypeAlias = list[Any]  # of what JSON has
Notes: TypeAlias = Sequence[tuple[int, str, int]]  # of each collective its number, what it is for, and its bytes

_OF_ALL = ("barrier", "monitored_barrier", "all_", "reduce_scatter")  # torch's collectives that need all ranks
_CALL_S = 20.0  # how long the system of another rank may take to accept a call, whatever its process does
_MESSAGE_BYTES = 1 << 24  # more than any message has, and less than what a stranger's first letters mean as a number


class Raised(NamedTuple):
    """An exception."""

    number: int  # of the last note before it
    place: str  # in words that follow "an exception"
    error: str  # its type and text, or in words that they are not known
    times: int  # how many are known since all ranks agreed, with this one


class State(NamedTuple):
    """The state of one rank, as it tells the others."""

    number: int = 0  # of its last note
    raised: Raised | None = None  # its last exception since all ranks agreed
    ended: bool = False  # it takes no part any more
    decided: str | None = None  # who is to blame
    call: tuple[str, int] | None = None  # the collective of the script in which it pauses, as ``script_call`` has it
    notes: Notes = ()
    gone: bool = False  # its process has ended
    heard: float = math.inf  # when this came from it, in seconds


class Links:
    """Connections to every other rank. The thread that calls ``receive`` alone may call the other methods.

    Ranks come at different times. Each leaves its address in the store, and then calls those whose address is there.
    So of two ranks that both have left their addresses, at least one calls the other, and one that dies before all
    have come is known to all that have. If both call, they have two connections, which harms nobody.

    Args:
        rank: of this process.
        size: how many ranks there are.
        store: of the ranks, in which there is nothing yet.
    """

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self._rank = rank
        self._open = list[Connection]()  # of which the other end may still say something
        self._rank_of = dict[Connection, int]()  # who has said something in a connection, or was called
        self._line = json.dumps((rank, [])).encode()  # the last message, which begins each new connection
        dual = socket.has_dualstack_ipv6()
        self._server = socket.create_server(
            ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, backlog=size, dualstack_ipv6=dual
        )
        self._server.setblocking(False)
        os.register_at_fork(after_in_child=self._close)
        host, own = _host_of(store), str(rank)
        try:
            store.set(own, json.dumps((_own_address(host), self._server.getsockname()[1])))
            for other in range(size):
                if other != rank and store.check([str(other)]):
                    address, port = json.loads(store.get(str(other)))
                    self._call(other, address or host, port)
        except dist.DistError as error:
            raise MisuseError(f"rank {rank} cannot find the others, as {STORE_IS_GONE}: {error}") from None

    def send(self, message: Message) -> None:
        """Send ``message`` to every rank that is there, and to those that come later unless another is sent before."""
        self._line = json.dumps((self._rank, message)).encode()
        for connection in self._open:
            self._send(connection)

    def receive(self, timeout_s: float) -> list[tuple[int, Message | None]]:
        """What has come from other ranks, by rank, [] from a new one. None, maybe twice, if its process has ended."""
        found = list[tuple[int, Message | None]]()
        for ready in wait([self._server, *self._open], timeout_s):
            if not isinstance(ready, Connection):
                with suppress(OSError):  # whoever called has given up
                    self._add(self._server.accept()[0])
                continue
            try:
                self._rank_of[ready], message = json.loads(ready.recv_bytes(_MESSAGE_BYTES))
                found.append((self._rank_of[ready], message))
            except (OSError, EOFError, ValueError, TypeError):  # the end of the other process, or no rank at all
                self._open.remove(ready)
                found += [(self._rank_of[ready], None)] if ready in self._rank_of else []
        return found

    def _close(self) -> None:
        """Close connections in a forked process, such as that of a DataLoader.

        A child that has them, too, would keep them open when this process is killed.
        """
        self._server.close()
        for each in self._open:
            each.close()

    def _call(self, rank: int, address: str, port: int) -> None:
        try:
            self._rank_of[self._add(socket.create_connection((address, port), timeout=_CALL_S))] = rank
        except ConnectionError:
            raise MisuseError(DIED.format(rank)) from None
        except OSError as error:
            raise MisuseError(
                f"rank {self._rank} cannot connect to rank {rank} at {address}, port {port}: {error}"
            ) from None

    def _add(self, called: socket.socket) -> Connection:
        called.settimeout(None)
        connection = Connection(called.detach())
        self._open.append(connection)
        self._send(connection)
        return connection

    def _send(self, connection: Connection) -> None:
        with suppress(OSError):  # the other rank has ended
            connection.send_bytes(self._line)


def _host_of(store: Any) -> str:
    """The host of the store at which all ranks meet, or of this process where the store is a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else socket.gethostname()


def _own_address(host: str) -> str | None:
    """The address at which other ranks reach this process: that of the interface towards ``host``, of their store.

    None: this is that host, whose address the others know better.
    """
    kind, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        own = str(probe.getsockname()[0])
    return None if own == target[0] or own.startswith("127.") or own == "::1" else own


def first_difference(notes: Mapping[int, Notes]) -> str | None:
    """The first note that differs between ranks, in words. None: there is none among those that are known.

    Args:
        notes: by rank.
    """
    ranks_of: dict[int, dict[str, list[int]]] = {}
    for rank in sorted(notes):
        for number, what, size_bytes in notes[rank]:
            place = f"{what} with {size_bytes:,} bytes" if size_bytes else what
            ranks_of.setdefault(number, {}).setdefault(place, []).append(rank)
    for _, found in sorted(ranks_of.items()):
        if len(found) > 1:
            # Most ranks do what is right, or the first one does.
            (usual, most), (other, few), *_ = sorted(found.items(), key=lambda item: (-len(item[1]), item[1][0]))
            return f"{named(few)} came to {other}, while {named(most)} came to {usual}. {REMEDY}"
    return None


def named(ranks: Sequence[int]) -> str:
    """``ranks`` in words."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# -- collectives of the script on the default group --------------------------------------------------------------------


def script_call(thread: int) -> tuple[str, int] | None:
    """The collective of the script that ``thread`` is in, of those that no rank leaves before all have come."""
    calls = [
        frame
        for frame, _ in traceback.walk_stack(sys._current_frames().get(thread))
        if frame.f_code.co_filename == dist.distributed_c10d.__file__ and frame.f_code.co_name.startswith(_OF_ALL)
    ]
    # A collective may be made of others: the outermost is that which the script has called.
    if not calls or calls[-1].f_locals.get("group") not in (None, dist.group.WORLD):
        return None
    return calls[-1].f_code.co_name, begun()


def begun() -> int:
    """How many collectives this rank has begun on the default group. 0 if torch does not say so."""
    with suppress(Exception):
        group: Any = dist.group.WORLD
        backends = {group._get_backend(device) for device in group._device_types}
        return sum(backend._get_sequence_number_for_group() for backend in backends)
    return 0


def end_script_call() -> None:
    """End the collective of the script, if it goes through NCCL, which waits for ever. Gloo ends as other ranks do."""
    with suppress(Exception):  # it may have ended meanwhile
        group: Any = dist.group.WORLD
        if any(group._get_backend(device).name() == "nccl" for device in group._device_types):
            group.abort()
