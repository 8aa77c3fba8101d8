"""Connections between all ranks, beside those of their process groups, over which a watcher hears of the others.

A connection tells of the death of a process: the kernel closes it within milliseconds, whatever killed the process. A
message that was sent before arrives before that. So nobody needs heartbeats, or a threshold after which silence means
death, which a slow machine would cross.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import selectors
import socket
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from protrain.common.errors import MisuseError

STORE_IS_GONE = "the process has ended that has the store of all ranks, which is rank 0 or the launcher"

Message: TypeAlias = dict[str, Any]  # anything that JSON has

_CALL_S = 20.0  # how long the system of another rank may take to accept a call, whatever its process does
_RECEIVED_BYTES = 1 << 20  # at once, more than any message has
_SEND_S = 1.0  # a rank that takes nothing for so long is stopped, and gets no further message
_TOKEN_BYTES = 8  # which keep strangers out


class Links:
    """One connection to every other rank. The thread that calls ``receive`` alone may call the other methods.

    Ranks come at different times. Each leaves its address in the store, and calls those that have come before it. So
    one that dies before all have come is known to all that have.

    Args:
        rank: of this process.
        size: how many ranks there are.
        store: of the ranks, in which there is nothing yet.
    """

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self._by_rank: dict[int, socket.socket] = {}
        self._received: dict[int, bytes] = {}
        self._deaf = set[int]()
        self._token = secrets.token_hex(_TOKEN_BYTES)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=dual)
        self._server.setblocking(False)
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._awake)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        _all.add(self)
        _close_in_children()
        try:
            self._news = self._call_who_has_come(rank, store)
        except dist.DistError as error:
            raise MisuseError(f"rank {rank} cannot find the others, as {STORE_IS_GONE}: {error}") from None

    def wake(self) -> None:
        """Let ``receive`` return at once. Any thread may call this."""
        with suppress(BlockingIOError):  # it has been woken many times already
            self._wakes.send(b".")

    def send(self, message: Message) -> None:
        """Send ``message`` to every rank that is there."""
        line = json.dumps(message).encode() + b"\n"
        for rank, connection in self._by_rank.items():
            if rank not in self._deaf:
                try:
                    connection.sendall(line)
                except OSError:  # it has ended, or is stopped
                    self._deaf.add(rank)

    def receive(self, timeout_s: float) -> list[tuple[int, Message | None]]:
        """What has come from other ranks, by rank.

        An empty message is the first of a rank, which has heard nothing yet. One with the name "unreachable" says why
        this rank cannot connect to that one. None comes from a rank whose process has ended.
        """
        found, self._news = self._news, []
        for key, _ in self._selector.select(0.0 if found else timeout_s):
            found += key.data()
        return found

    def descriptors(self) -> list[int]:
        """The file descriptors of all connections."""
        return [each.fileno() for each in (*self._by_rank.values(), self._server, self._woken, self._wakes)]

    def _awake(self) -> list[tuple[int, Message | None]]:
        self._woken.recv(4096)
        return []

    def _read(self, rank: int) -> list[tuple[int, Message | None]]:
        """What ``rank`` has sent."""
        connection = self._by_rank[rank]
        try:
            data = connection.recv(_RECEIVED_BYTES)
        except OSError:  # reset by the end of the other process
            data = b""
        *lines, self._received[rank] = (self._received[rank] + data).split(b"\n")
        found: list[tuple[int, Message | None]] = [(rank, json.loads(line)) for line in lines]
        if not data:
            self._selector.unregister(connection)
            self._deaf.add(rank)
            found.append((rank, None))
        return found

    def _call_who_has_come(self, rank: int, store: dist.Store) -> list[tuple[int, Message | None]]:
        """Leave the address of this rank in the store, and connect to the ranks that have done so before."""
        host, found = _host_of(store), list[tuple[int, Message | None]]()
        own = rank, _own_address(host), self._server.getsockname()[1], self._token
        place = store.add("come", 1)
        store.set(str(place), json.dumps(own))
        for before in map(str, range(1, place)):
            store.wait([before], timedelta(seconds=_CALL_S))  # it may have come just now
            other, address, port, token = json.loads(store.get(before))
            try:
                connection = socket.create_connection((address or host, port), timeout=_CALL_S)
                connection.sendall(f"{token} {rank:8d}".encode())
            except ConnectionError:  # it has died since
                found.append((other, None))
            except OSError as error:
                found.append((other, {"unreachable": f"{address or host}, port {port}: {error}"}))
            else:
                found += self._linked(other, connection)
        return found

    def _accept(self) -> list[tuple[int, Message | None]]:
        """Someone calls."""
        try:
            connection, _ = self._server.accept()
        except OSError:  # and has given up
            return []
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._greet, connection, b""))
        return []

    def _greet(self, connection: socket.socket, heard: bytes) -> list[tuple[int, Message | None]]:
        """``connection`` says who calls, of which ``heard`` came before."""
        self._selector.unregister(connection)
        whole = len(self._token) + 9
        try:
            more = connection.recv(whole - len(heard))
        except OSError:
            more = b""
        heard += more
        if len(heard) == whole and heard.startswith(self._token.encode()):
            return self._linked(int(heard[-8:]), connection)
        if more and len(heard) < whole:
            self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._greet, connection, heard))
        else:  # a stranger
            connection.close()
        return []

    def _linked(self, rank: int, connection: socket.socket) -> list[tuple[int, Message | None]]:
        """``connection`` is that to ``rank``."""
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._by_rank[rank], self._received[rank] = connection, b""
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._read, rank))
        return [(rank, {})]


_all: weakref.WeakSet[Links] = weakref.WeakSet()


@functools.cache
def _close_in_children() -> None:
    """Close connections in forked processes, such as those of a DataLoader.

    A child that has them, too, would keep them open when this process is killed.
    """
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for links in _all:
        for descriptor in links.descriptors():
            if descriptor >= 0:
                os.close(descriptor)
    _all.clear()


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
