"""The states of a chunk: which work may follow which, and who waits for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protrain.distributed.ranks import Ranks
from protrain.engine.states.chunks import Chunk, ChunkState
from protrain.engine.streams import Streams
from protrain.engine.updates.worker import Job

BEGUN = [ChunkState.SPECULATED, ChunkState.UPDATING]
ILLEGAL = {
    (ChunkState.SPECULATED, ChunkState.SPECULATED),
    (ChunkState.UPDATING, ChunkState.SPECULATED),
}


def chunk_of(index: int, **states: Any) -> Chunk:
    """A chunk of 128 elements in host memory."""
    streams = Streams()
    return Chunk(
        index=index,
        elements=128,
        shard=slice(0, 128),
        ranks=Ranks(None),
        trainable=True,
        persistent=False,
        large=False,
        offloaded=streams.mark(),
        uploaded=streams.mark(),
        updated=streams.mark(),
        **({"weight": torch.zeros(128)} | states),
    )


def job(*, fails: bool = False) -> Job:
    """A job that is over, so that whoever waits for it goes on."""

    def work() -> None:
        if fails:
            raise RuntimeError("the work failed")

    made = Job(work)
    made.run()
    return made


def chunk_in(state: ChunkState) -> Chunk:
    """A chunk in ``state``."""
    chunk = chunk_of(0)
    if state is not ChunkState.CURRENT:
        chunk.begin(state, job())
    assert chunk.state is state
    return chunk


@pytest.mark.parametrize("before", list(ChunkState))
@pytest.mark.parametrize("after", BEGUN)
def test_only_legal_work_begins(before: ChunkState, after: ChunkState) -> None:
    chunk, new = chunk_in(before), job()
    if (before, after) not in ILLEGAL:
        chunk.begin(after, new)
        assert chunk.state is after
    else:
        with pytest.raises(AssertionError, match=f"illegal ChunkState transition {before.label} -> {after.label}"):
            chunk.begin(after, new)
        assert chunk.state is before


@pytest.mark.parametrize("state", BEGUN)
def test_a_wait_ends_in_a_current_chunk(state: ChunkState) -> None:
    chunk = chunk_in(state)
    chunk.wait()
    assert (chunk.state, chunk.update) == (ChunkState.CURRENT, None)
    assert chunk.is_free()


def test_a_fetch_waits_for_the_weight_and_not_for_the_deferred_update() -> None:
    chunk, deferred = chunk_of(0), Job(lambda: None)
    chunk.begin(ChunkState.UPDATING, job(), then=deferred)
    chunk.wait_for_update()
    assert not deferred.done
    assert not chunk.is_free()
    assert chunk.state is ChunkState.UPDATING
    deferred.run()
    chunk.wait()
    assert chunk.state is ChunkState.CURRENT


def test_a_fetch_of_a_chunk_that_only_speculates_does_not_wait() -> None:
    chunk = chunk_of(0)
    chunk.begin(ChunkState.SPECULATED, Job(lambda: None))  # nobody runs it
    chunk.wait_for_update()
    assert chunk.state is ChunkState.SPECULATED


@pytest.mark.parametrize(("state", "times"), [(ChunkState.SPECULATED, 1), (ChunkState.UPDATING, 2)])
def test_an_error_is_raised_in_all_who_wait_unless_nothing_was_changed(state: ChunkState, times: int) -> None:
    chunk = chunk_of(0)
    chunk.begin(state, job(fails=True))
    raised = 0
    for _ in range(2):
        try:
            chunk.wait()
        except RuntimeError:
            raised += 1
    assert raised == times


def test_uploads_read_the_committed_weight_until_the_other_states_have_caught_up() -> None:
    weight, other = torch.zeros(128), torch.ones(128)
    moments = {"exp_avg": torch.zeros(128), "exp_avg_sq": torch.zeros(128)}
    chunk = chunk_of(0, weight=weight, speculative=other, **moments)
    assert chunk.current_weight is weight
    chunk.commit()
    assert chunk.current_weight is other
    chunk.catch_up([], torch.zeros(128), None, threads=1)
    assert chunk.current_weight is weight
