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
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

Message: TypeAlias = dict[str, Any]  # anything that JSON has

_CONNECT_S = 20.0  # all ranks have met before they connect, so this is ample
_RECEIVED_BYTES = 1 << 20  # at once, more than any message has
_SEND_S = 1.0  # a rank that takes nothing for so long is stopped, and gets no further message


class Links:
    """One connection to every other rank. The thread that calls ``receive`` alone may call the other methods.

    Args:
        rank: of this process.
        size: how many ranks there are.
        exchange: gives what all ranks pass to it, in rank order.
    """

    def __init__(self, rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> None:
        self._by_rank = _connect(rank, size, exchange)
        self._received = dict.fromkeys(self._by_rank, b"")
        self._deaf = set[int]()
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for other, connection in self._by_rank.items():
            self._selector.register(connection, selectors.EVENT_READ, other)
        _all.add(self)
        _close_in_children()

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
        """What has come from other ranks, by rank: messages, and None from a rank whose process has ended."""
        found: list[tuple[int, Message | None]] = []
        for key, _ in self._selector.select(timeout_s):
            rank: int | None = key.data
            if rank is None:
                self._woken.recv(4096)
                continue
            try:
                data = self._by_rank[rank].recv(_RECEIVED_BYTES)
            except OSError:  # reset by the end of the other process
                data = b""
            *lines, self._received[rank] = (self._received[rank] + data).split(b"\n")
            found += [(rank, json.loads(line)) for line in lines]
            if not data:
                self._selector.unregister(key.fileobj)
                self._deaf.add(rank)
                found.append((rank, None))
        return found

    def descriptors(self) -> list[int]:
        """The file descriptors of all connections."""
        return [connection.fileno() for connection in (*self._by_rank.values(), self._woken, self._wakes)]


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


def _connect(rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> dict[int, socket.socket]:
    """A connection to each of the other ranks: this one calls lower ranks and is called by higher ones."""
    token = secrets.token_hex(8)  # keeps strangers out
    found: dict[int, socket.socket] = {}
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=dual) as server:
        store = _store_host()
        every = exchange((_own_address(store), server.getsockname()[1], token))
        for other, (address, port, others_token) in enumerate(every[:rank]):
            connection = socket.create_connection((address or store, port), timeout=_CONNECT_S)
            connection.sendall(f"{others_token} {rank:8d}".encode())
            found[other] = connection
        end = monotonic() + _CONNECT_S
        while len(found) < size - 1:
            server.settimeout(max(0.01, end - monotonic()))
            connection, _ = server.accept()
            connection.settimeout(_CONNECT_S)
            hello = _read(connection, len(token) + 9)
            if hello.startswith(token):
                found[int(hello[len(token) :])] = connection
            else:
                connection.close()
    for connection in found.values():
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _read(connection: socket.socket, count: int) -> str:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data.decode(errors="replace")


def _store_host() -> str:
    """The host of the store at which all ranks have met, or of this process where the store is a file."""
    store: Any = _get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else socket.gethostname()


def _own_address(store: str) -> str | None:
    """The address at which other ranks reach this process: that of the interface towards the host ``store``.

    None: this is that host, whose address the others know better.
    """
    kind, _, _, _, target = socket.getaddrinfo(store, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        own = str(probe.getsockname()[0])
    return None if own == target[0] or own.startswith("127.") or own == "::1" else own
