"""Who needs which chunk next, and the buffers that chunks pass through: nothing is fetched twice that could be kept."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError
from protrain.distributed.ranks import Ranks
from protrain.engine.states.arena import ActivationBytes, Arena, EngineMemory
from protrain.engine.states.chunks import Chunk, ChunkState
from protrain.engine.streams import Streams
from protrain.engine.updates.worker import HostWorker, Job
from protrain.engine.weights.buffers import BufferPool, Residency
from protrain.hardware.detection import detect
from protrain.planning import evaluate
from protrain.planning.schedule import Schedule
from tests.engine.harness import CKPT, NONE, Spec, adamw, wrap_under

ELEMENTS = 128

# -- schedule ----------------------------------------------------------------------------------------------------------


def test_units_called_out_of_order_keep_the_schedule_usable() -> None:
    schedule = Schedule([0, 1, 2, 2, 1, 0], [[0], [1], [2]])
    for unit, position in ((2, 2), (0, 5), (1, 1), (7, 1), (1, 1), (2, 2), (2, 2)):
        schedule.enter(unit)
        assert schedule.position == position
    schedule.enter(1, start=3)
    assert schedule.position == 4


# -- chunk buffers -----------------------------------------------------------------------------------------------------


def make_chunk(index: int, update: Job | None = None, *, persistent: bool = False) -> Chunk:
    streams = Streams()
    chunk = Chunk(
        index=index,
        elements=ELEMENTS,
        shard=slice(0, ELEMENTS),
        ranks=Ranks(None),
        trainable=True,
        persistent=persistent,
        large=False,
        weight=torch.full((ELEMENTS,), float(index + 1)),
        offloaded=streams.mark(),
        uploaded=streams.mark(),
        updated=streams.mark(),
    )
    if update is not None:
        chunk.begin(ChunkState.UPDATING, update)
    return chunk


LEGAL = {
    (Residency.EMPTY, Residency.ASSIGNED),
    (Residency.ASSIGNED, Residency.UPLOADED),
    (Residency.UPLOADED, Residency.WHOLE),
    *((before, Residency.EMPTY) for before in (Residency.ASSIGNED, Residency.UPLOADED, Residency.WHOLE)),
}


def make_pool(n_buffer: int, *, resident: Sequence[Chunk] = ()) -> BufferPool:
    device = torch.device("cpu")
    memory = EngineMemory(
        device=device,
        dtype=torch.float32,
        streams=Streams(),
        arena=Arena(device),
        ranks=Ranks(None),
        free_device_bytes=0,
        activations=ActivationBytes(0, 0),
        host_bytes=0,
        poison=True,
    )
    return BufferPool(memory, resident=resident, n_buffers=(n_buffer, 0), buffer_elements=(ELEMENTS, 0))


def test_only_legal_transitions_are_possible() -> None:
    buffer = make_pool(1).buffers[0]
    for before, after in itertools.product(Residency, Residency):
        buffer.state = before
        if (before, after) in LEGAL:
            buffer.become(after)
            assert buffer.state is after
        else:
            with pytest.raises(AssertionError, match=f"illegal Residency transition {before.label} -> {after.label}"):
                buffer.become(after)
            assert buffer.state is before


def test_a_buffer_is_kept_while_held_and_poisoned_when_given_up() -> None:
    chunks = [make_chunk(index) for index in range(3)]
    schedule, pool = Schedule([0, 1, 2], [[0], [1], [2]]), make_pool(2)
    first = pool.acquire(chunks[0], schedule)
    assert first.eq(1.0).all()
    assert pool.buffers[0].chunk is chunks[0]
    pool.acquire(chunks[1], schedule)
    assert pool.acquire(chunks[0], schedule) is first
    assert pool.fetches == 2, "it was there"
    chunks[2].parameters[7] = "head.weight"
    with pytest.raises(MisuseError, match=r"uses head.weight, but .* all chunk buffers.* pass an example_batch"):
        pool.acquire(chunks[2], schedule)
    with pytest.raises(AssertionError, match="updated while a unit uses it"):
        pool.invalidate(chunks[0])
    pool.release(chunks[0])
    assert pool.in_use(chunks[0]), "it was acquired twice"
    pool.release(chunks[0])
    assert not pool.in_use(chunks[0])
    chunks[0].weight.fill_(7.0)
    assert first.eq(1.0).all()
    pool.invalidate(chunks[0])
    assert first.isnan().all()
    assert pool.buffers[1].chunk is chunks[1]
    assert pool.acquire(chunks[0], schedule).eq(7.0).all(), "the weight after its update"
    assert pool.used(chunks[1]).memory.eq(2.0).all()
    pool.release(chunks[1])
    with pytest.raises(AssertionError):
        pool.used(chunks[1])


def test_a_persistent_chunk_has_its_weight_for_a_buffer_and_never_gives_it_up() -> None:
    chunks = [make_chunk(0, persistent=True), make_chunk(1), make_chunk(2)]
    schedule, pool = Schedule([0, 1], [[1], [2]]), make_pool(1, resident=chunks[:1])
    for unit, other in enumerate(chunks[1:]):
        schedule.enter(unit)
        pool.acquire_all([chunks[0], other], schedule)
        assert pool.used(chunks[0]).memory is chunks[0].weight
        assert pool.used(other).memory.eq(other.index + 1.0).all()
        pool.release(other)
        assert any(map(pool.in_use, chunks))
        pool.release(chunks[0])
        assert not any(map(pool.in_use, chunks))
    chunks[0].weight.fill_(7.0)
    pool.invalidate(chunks[0])
    assert pool.acquire(chunks[0], schedule).eq(7.0).all(), "an update of the weight is one of the buffer"
    assert pool.fetches == 2, "of the others"


def test_a_fetch_ahead_gives_up_nothing_that_is_needed_sooner() -> None:
    chunks = [make_chunk(index) for index in range(4)]
    schedule, pool = Schedule([0, 1, 2, 3], [[0], [1], [2], [3]]), make_pool(2)

    def held() -> list[int]:
        return sorted(buffer.chunk.index for buffer in pool.buffers if buffer.chunk)

    pool.prefetch(chunks, schedule)
    assert held() == [0, 1]
    schedule.enter(0)
    pool.acquire(chunks[0], schedule)
    pool.prefetch(chunks, schedule)
    assert held() == [0, 1], "both are needed before chunk 2"
    pool.release(chunks[0])
    schedule.enter(1)
    pool.acquire(chunks[1], schedule)
    pool.prefetch(chunks, schedule)
    assert held() == [1, 2]


def test_a_chunk_whose_update_runs_is_uploaded_by_whoever_finishes_it() -> None:
    gate = threading.Event()
    worker = HostWorker(threads=1, device=torch.device("cpu"))
    chunk = make_chunk(0)

    def update() -> None:
        assert gate.wait(20)
        chunk.weight.fill_(9.0)

    chunk.begin(ChunkState.UPDATING, worker.submit(update))
    schedule, pool = Schedule([0], [[0]]), make_pool(1)
    pool.prefetch([chunk], schedule)
    assert pool.buffers[0].state is Residency.ASSIGNED
    assert pool.fetches == 0
    gate.set()
    worker.drain()
    assert pool.buffers[0].state is Residency.UPLOADED, "nobody asked for it yet"
    assert pool.acquire(chunk, schedule).eq(9.0).all()
    assert pool.buffers[0].state is Residency.WHOLE
    assert pool.fetches == 1


def test_a_chunk_queued_again_waits_for_the_later_update() -> None:
    earlier, later = Job(lambda: None), Job(lambda: None)
    chunk = make_chunk(0, earlier)
    schedule, pool = Schedule([0], [[0]]), make_pool(1)
    pool.prefetch([chunk], schedule)
    pool.invalidate(chunk)
    chunk.begin(ChunkState.UPDATING, later)
    pool.prefetch([chunk], schedule)
    earlier.run()  # late: a step has passed meanwhile
    assert pool.buffers[0].state is Residency.ASSIGNED
    later.run()
    assert pool.fetches == 1
    assert pool.acquire(chunk, schedule).eq(1.0).all()


def test_a_queued_chunk_that_was_given_up_is_not_uploaded() -> None:
    gate = threading.Event()
    worker = HostWorker(threads=1, device=torch.device("cpu"))
    chunks = [make_chunk(0, worker.submit(lambda: assert_true(gate.wait(20)))), make_chunk(1)]
    schedule, pool = Schedule([0, 1], [[0], [1]]), make_pool(1)
    pool.prefetch(chunks, schedule)
    assert pool.acquire(chunks[1], schedule).eq(2.0).all()
    gate.set()
    worker.drain()
    assert pool.buffers[0].memory.eq(2.0).all()
    assert pool.fetches == 1


def assert_true(value: bool) -> None:
    assert value


def fewest_fetches(visits: Sequence[Sequence[int]], n_buffer: int) -> int:
    """The optimum, by trying every choice of what to give up."""

    @functools.cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(visits):
            return 0
        wanted = frozenset(visits[at])
        missing = len(wanted - held)
        others = sorted(held - wanted)
        room = min(n_buffer - len(wanted), len(others))
        return missing + min(best(at + 1, wanted | set(kept)) for kept in itertools.combinations(others, room))

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(25))
def test_eviction_is_optimal(seed: int) -> None:
    generator = random.Random(seed)
    n_chunks, n_buffer = generator.randint(3, 6), generator.randint(2, 4)
    unit_chunks = [sorted(generator.sample(range(n_chunks), generator.randint(1, 2))) for _ in range(4)]
    forward = [generator.randrange(4) for _ in range(6)]
    visits = forward + forward[::-1]
    chunks = [make_chunk(index) for index in range(n_chunks)]
    schedule, pool = Schedule(visits, unit_chunks), make_pool(n_buffer)
    for at, unit in enumerate(visits):
        schedule.enter(unit, start=at)
        pool.acquire_all([chunks[index] for index in unit_chunks[unit]], schedule)
        assert all(pool.used(chunks[index]).memory.eq(index + 1.0).all() for index in unit_chunks[unit])
        for index in unit_chunks[unit]:
            pool.release(chunks[index])
    assert pool.fetches == fewest_fetches([unit_chunks[unit] for unit in visits], n_buffer)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


class Scaled(nn.Module):
    """With a parameter that has no dimension, and one that has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(8, 8), nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.gain


def test_parameters_keep_every_shape_wherever_they_are() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Scaled() for _ in range(3))), (torch.randn(4, 8),)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    spec = Spec("none", "least", (CKPT, NONE))
    wrapped, trainer = wrap_under(spec, model, adamw(model), batch, device=torch.device("cpu"))
    losses = []
    for _ in range(3):
        assert {name: tuple(parameter.shape) for name, parameter in wrapped.named_parameters()} == shapes
        loss = wrapped(*batch).square().mean()
        loss.backward()
        trainer.step()
        trainer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[1] < losses[0]
    assert {name: tuple(value.shape) for name, value in wrapped.state_dict().items()} == shapes
    assert float(wrapped.state_dict()["0.gain"]) != 1.5


@pytest.mark.parametrize(("chunk_elements", "per_block", "n_ckpt"), [(512, 1, 0), (256, 2, 6)])
def test_buffers_full_after_forward_serve_backward_and_fill_for_the_next_forward(
    chunk_elements: int, per_block: int, n_ckpt: int
) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(*(Block() for _ in range(6)))

    batch = (torch.randn(4, 16),)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    profile = protrain.profile(model, batch, optimizer=optimizer, device="cpu", dtype=torch.float32)
    machine = detect("cpu", device_memory="1GiB", host_memory="1GiB")
    n_chunks = 6 * per_block
    for n_persist, n_buffer in [(0, per_block), (0, per_block + 1), (0, n_chunks - 1), (0, n_chunks), (per_block, 3)]:
        model = build()
        counts: dict[str, Any] = {"n_persist": n_persist, "n_buffer": n_buffer, "n_swap": 0, "n_ckpt": n_ckpt}
        wrapped, trainer = protrain.wrap(
            model,
            torch.optim.AdamW(model.parameters()),
            example_batch=batch,
            device="cpu",
            plan=evaluate(profile, machine, chunk_elements=chunk_elements, **counts),
            progress=False,
        )
        away, fetches = n_chunks - n_persist, []
        for _ in range(3):
            wrapped(*batch).square().mean().backward()
            trainer.step()
            trainer.zero_grad()
            trainer.state_dict()  # waits for the updates, and what they upload
            fetches.append(trainer.report().fetches)
        a_step = away + (away - n_buffer)
        # All buffers are full again before the next forward begins.
        assert fetches == [a_step + n_buffer, 2 * a_step + n_buffer, 3 * a_step + n_buffer], f"n_buffer={n_buffer}"
