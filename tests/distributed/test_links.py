"""Connections between ranks: who is reached, who has died, and who is no rank at all."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from protrain.common.errors import MisuseError
from protrain.distributed.links import Links, Message


def received(links: Links, count: int) -> list[tuple[int, Message | None]]:
    """The first ``count`` messages that have something to say."""

    def all_said() -> Iterator[tuple[int, Message | None]]:
        for _ in range(20):
            yield from (each for each in links.receive(0.2) if each[1] != [])

    found = all_said()
    return [next(found) for _ in range(count)]


def test_ranks_that_come_one_after_the_other_hear_of_each_other() -> None:
    store = dist.HashStore()
    first = Links(0, 3, store)
    first.send(["told before the other has come"])
    second = Links(2, 3, store)
    assert first.receive(1.0) == []  # it accepts the call
    assert received(second, 1) == [(0, ["told before the other has come"])]
    second.send([1, None])
    assert received(first, 1) == [(2, [1, None])]


def test_a_rank_that_was_killed_after_it_had_left_its_address_is_named() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("0", json.dumps(("127.0.0.1", server.getsockname()[1])))
    with pytest.raises(MisuseError, match="rank 0 has died"):
        Links(1, 3, store)


def test_strangers_are_not_listened_to() -> None:
    store = dist.HashStore()
    links = Links(0, 2, store)
    address = "127.0.0.1", json.loads(store.get("0"))[1]
    for said in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\4abcd", b""):
        with socket.create_connection(address) as stranger:
            stranger.sendall(said)
    assert [links.receive(0.2) for _ in range(6)] == [[]] * 6
    other = Links(1, 2, store)
    other.send(["a rank"])
    assert received(links, 1) == [(1, ["a rank"])]
