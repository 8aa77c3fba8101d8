"""AdamW on the chunks of an engine: on the device, by the host worker, in advance, and by the device beside it.

[Note: early updates] Whether a step clips, is skipped, or has other hyperparameters is known when step() is called. By
then the host could have done its updates beside backward. So where the plan gives a chunk room for a second copy of its
states, its update is done as soon as its gradient has arrived, from the old copy to the new, as if nothing were to be
clipped. step() has the host worker look whether everything was as supposed: the copies change places, which costs
nothing, or the update is done from the old copy, which nobody has touched. Either way the bits are those of an update
at step(). After a step that was not as supposed the next one does without.

The next forward waits for weights alone. So where the plan has ``early_weights``, only those are made early, which
takes less memory and time, and the states follow once the updates are done that something waits for (deferred): the
host does more, but not while the step waits for it. Of one plan's chunks some may have a whole copy and some a second
weight (``n_whole``).

Gradients come in the order opposite to that in which the next forward needs its chunks. So what the host has not begun
by the end of backward is not done early any more, but in the order of need. That holds for updates inside backward
(``step_during_backward``) as well, which wait for no step() and need no second copy. While the host updates those,
chunks that are done go up whenever the link has nothing to do, also before their turn.

[Note: streamed updates] Some chunks in host memory the device updates while the host updates others. A thread of their
own takes those jobs: it waits for what the host worker would wait for, has the device stream the states through itself,
and sleeps until they are back. So whatever follows an update need not know who did it.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from protrain.engine.engine import Engine
from protrain.engine.states.chunks import Chunk, Piece
from protrain.engine.streams import Mark
from protrain.engine.updates.streamer import Scale
from protrain.engine.updates.turns import Ahead, Once, Turn
from protrain.engine.updates.worker import HostWorker, Job
from protrain_kernels import AdamScalars, adam_scalars

_COUNTED_UPDATES = 2000


@dataclass
class Tally:
    """How early updates have turned out, and how fast updates were. Written by the host worker."""

    as_supposed: bool = True  # the last step
    adopted: int = 0
    redone: int = 0
    # The last whole updates on the host: elements, and the seconds that they took.
    counted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_COUNTED_UPDATES))

    @contextmanager
    def counting(self, pieces: list[Piece]) -> Iterator[Callable[[Callable[[], bool]], bool]]:
        """The body updates ``pieces`` on the host, states and all; what it gets calls what does not count."""
        aside_s = 0.0

        def aside(work: Callable[[], bool]) -> bool:
            nonlocal aside_s
            begin = time.perf_counter()
            answer = work()
            aside_s += time.perf_counter() - begin
            return answer

        begin = time.perf_counter()
        yield aside
        elements = sum(part.stop - part.start for part, _ in pieces)
        self.counted.append((elements, time.perf_counter() - begin - aside_s))


@dataclass(eq=False)
class _Round:
    """The early updates of one step."""

    end: Mark | None = None  # the end of the last backward: once step() was called or, with updates inside, at that end

    def is_over(self) -> bool:
        """Whether updates in the order of need may begin.

        Never while its backward runs: a job given to the host in that does its work, and so a region of gradients is
        free when the job is done.
        """
        return self.end is not None and self.end.reached()


@dataclass(eq=False)
class _Early:
    """An update done, or about to be, before its step."""

    pieces: list[Piece]
    factor: float
    done: bool = False
    dropped: bool = False  # nobody will want it
    version: int = -1  # of the weight that it began from


class Updates:
    """Every update of one engine. The ``optimizer``'s param_groups are read anew at every step."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, *, decoupled: bool) -> None:
        self.steps = [0] * len(engine.members)  # of each parameter: those without a gradient are skipped
        self.tally = Tally()
        self._engine = engine
        self._optimizer = optimizer  # its list of groups may be replaced
        self._decoupled = decoupled  # whatever groups say
        self._early: dict[int, _Early] = {}  # by chunk
        self._round = _Round()
        self._begun_with: list[AdamScalars] | None = None  # hyperparameters at the last backward; None: wrong ones
        self._inside: list[tuple[Chunk, Once]] = []  # updates given to the host in this backward
        self._backwards = 0  # since the last step, without those that only accumulate
        self._usual_backwards = 1
        self._all_done: list[Job] = []  # of each worker: every update of the last step is
        self._ahead = Ahead(engine.buffers.link_is_idle)
        self._host_scale = engine.arena.take(1, torch.float32)
        self._device_scale = engine.streams.lasting(torch.ones(1, dtype=torch.float32, device=engine.device))
        self._scale_ready = engine.streams.mark()

    def check_hyperparameters(self) -> list[AdamScalars]:
        """Those of all groups; ValueError for a wrong one before anything is updated: no half step is left behind."""
        return [self._scalars(group_index, 1) for group_index in range(len(self._optimizer.param_groups))]

    def has_gradients(self, chunk: Chunk) -> bool:
        """Whether an update of ``chunk`` would do anything."""
        return any(self._engine.gradients.present[member.index] for member in chunk.members)

    def publish(self, factor: Tensor) -> Scale:
        """``factor``, 0-d on the device, for the device and the host."""
        for job in self._all_done:
            job.wait()  # long ago, where a forward came in between that needed their chunks, and a backward their room
        streams = self._engine.streams
        streams.compute_waits(self._scale_ready)  # the copy of the step before may still read it
        self._device_scale.copy_(factor.reshape(1))  # a temporary could be gone before the copy to the host has run
        computed = streams.mark()
        streams.compute_reached(computed)
        streams.offload(self._host_scale, self._device_scale, after=computed, done=self._scale_ready)
        return Scale(self._device_scale, self._host_scale, self._scale_ready)

    # -- in advance ----------------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """A backward that does not only accumulate."""
        self._backwards += 1
        try:
            self._begun_with = self.check_hyperparameters()
        except ValueError:  # step() says so, unless it is mended until then
            self._begun_with = None

    def begin_early(self, chunk: Chunk, factor: float) -> None:
        """Update ``chunk``, whose gradient is complete, if there is room; ``factor`` is what is supposed.

        Not in a backward that is not the usual number of them into its step: another may follow.
        """
        if chunk.spare is None and chunk.early_weight is None:
            return
        if not self.tally.as_supposed or self._backwards != self._usual_backwards:
            return
        try:
            pieces = self._pieces(chunk)
        except ValueError:  # a wrong hyperparameter: step() says so, unless it is mended until then
            return
        if sum(part.stop - part.start for part, _ in pieces) != chunk.elements:
            return  # the rest of the other copy would not be what it is in this one
        early = self._early[chunk.index] = _Early(pieces, factor)
        gradient = self._engine.gradients.host_gradient(chunk)
        scale = None if factor == 1.0 else torch.tensor([factor], dtype=torch.float32, device="cpu")
        threads, this_round, accumulation = self._engine.worker.threads, self._round, chunk.accumulation
        tally = self.tally

        def on_host() -> None:  # of the engine nothing, as in _update
            if not early.dropped and not this_round.is_over():
                if accumulation is not None:
                    accumulation.wait()  # as in _update_on_host
                chunk.offloaded.wait()
                chunk.uploaded.wait()
                early.version = chunk.version
                with tally.counting(pieces) if chunk.early_weight is None else nullcontext():
                    chunk.step_aside(pieces, gradient, scale, threads=threads)
                early.done = True

        what = "early update" if chunk.early_weight is None else "early weight"
        chunk.early = self._engine.worker.submit(on_host, f"{what} {chunk.index}")

    def forget(self) -> None:
        """Gradients are gone, and what was done with them."""
        for early in self._early.values():
            early.dropped = True
        self._early.clear()
        self._inside.clear()
        self._backwards = 0
        self._round = _Round()

    # -- for good ------------------------------------------------------------------------------------------------------

    def step(self, scale: Scale | None, supposed: float) -> None:
        """Update every parameter that has a gradient; ``supposed`` is what early updates took for the scale."""
        self._end_round()
        foreseen = supposed if self.check_hyperparameters() == self._begun_with else None
        made = (self._update(chunk, scale, foreseen) for chunk in self._engine.chunks)
        self._queue(turn for turn in made if turn is not None)
        self._usual_backwards = max(1, self._backwards)
        self._backwards = 0

    def update_inside(self, chunk: Chunk) -> None:
        """Update one chunk inside backward, for good: on the device at once, or by the host worker."""
        pieces, gradients = self._begin(chunk), self._engine.gradients
        if pieces:
            self._begin_inside(chunk, pieces)
        for member in chunk.members:  # the gradient is used up, also where backward fails and there is no zero_grad
            gradients.present[member.index] = False
        gradients.give_back(chunk)

    def _begin_inside(self, chunk: Chunk, pieces: list[Piece]) -> None:
        if chunk.persistent:
            self._update_on_device(chunk, pieces, None)
            return
        once, this_round = Once(self._away(chunk, pieces, None)), self._round

        def on_host() -> None:
            if not this_round.is_over():
                once.run()

        self._inside.append((chunk, once))
        self._worker(chunk).queue(self._job(chunk, on_host, f"early update {chunk.index}"))

    def backward_ends(self) -> None:
        """What was given to the host inside backward and isn't begun by its end comes in the order of need."""
        self._end_round()
        inside = sorted(self._inside, key=lambda pair: pair[0].index)
        self._queue(
            Turn(chunk, self._job(chunk, once.run, f"update {chunk.index}"), once.begun) for chunk, once in inside
        )
        self._inside.clear()

    def _end_round(self) -> None:
        streams = self._engine.streams
        end = streams.mark()
        streams.compute_reached(end)
        self._round.end = end  # now, as an event that was never recorded counts as reached
        self._round = _Round()

    def _begin(self, chunk: Chunk) -> list[Piece]:
        """What is to be updated; counts the step of its parameters."""
        pieces = self._pieces(chunk)
        for member in chunk.members if pieces else ():
            if self._engine.gradients.present[member.index]:
                self.steps[member.index] += 1
        return pieces

    def _update(self, chunk: Chunk, scale: Scale | None, supposed: float | None) -> Turn | None:
        pieces = self._begin(chunk)
        if not pieces:
            return None
        if chunk.persistent:
            self._update_on_device(chunk, pieces, scale)
            return None
        update = self._away(chunk, pieces, scale)
        if chunk.streamed:
            return Turn(chunk, self._job(chunk, update, f"update {chunk.index}"), lambda: False)
        early, tally = self._early.pop(chunk.index, None), self.tally
        if chunk.early is None:  # other gradients came, even if the backward that brought them failed
            early = None

        def factor() -> float:  # of the engine nothing, as in _away
            if scale is None:
                return 1.0
            scale.ready.wait()
            return scale.on_host.item()

        def is_made() -> bool:
            return early is not None and _holds(early, pieces, factor(), chunk.version)

        def on_host() -> None:
            tally.as_supposed = factor() == supposed
            if is_made():
                if chunk.spare is None:
                    chunk.uploaded.wait()  # of the weight before: from now on uploads take the early one
                    chunk.states_behind = True
                else:
                    chunk.adopt()
                tally.adopted += 1
            else:
                update()
                tally.redone += early is not None and early.done

        job = self._job(chunk, on_host, f"update {chunk.index}")
        if early is not None and chunk.early_weight is not None:
            chunk.states_update = self._states_update(chunk, pieces, scale)
        return Turn(chunk, job, is_made, chunk.states_update)

    def _states_update(self, chunk: Chunk, pieces: list[Piece], scale: Scale | None) -> Job:
        """What comes after an early weight that a step takes; nothing after another."""
        gradient, threads = self._engine.gradients.host_gradient(chunk), self._engine.worker.threads
        tally = self.tally

        def on_host() -> None:
            if chunk.states_behind:
                with tally.counting(pieces):
                    chunk.step(pieces, gradient, None if scale is None else scale.on_host, threads=threads)
                chunk.states_behind = False  # the two weights have the same bits now

        return self._engine.worker.job(on_host, f"deferred update {chunk.index}")

    def _update_on_device(self, chunk: Chunk, pieces: list[Piece], scale: Scale | None) -> None:
        engine = self._engine
        factor = None if scale is None else scale.on_device
        for first, gradient in engine.gradients.device_gradient(chunk):
            chunk.step(pieces, gradient, factor, threads=engine.worker.threads, first=first)

    def _away(self, chunk: Chunk, pieces: list[Piece], scale: Scale | None) -> Callable[[], None]:
        """The update of a chunk in host memory, for the worker that does it. See [Note: streamed updates]."""
        engine = self._engine  # what is returned has nothing of it: a model that is dropped must not wait for updates
        gradient, streamer = engine.gradients.host_gradient(chunk), engine.streamer
        update: Callable[..., None]
        if chunk.streamed:
            assert streamer is not None
            update = streamer.update
        else:
            update = functools.partial(
                _update_on_host, threads=engine.worker.threads, ahead=self._ahead, tally=self.tally
            )
        return functools.partial(update, chunk, pieces, gradient, scale, chunk.accumulation)

    def _job(self, chunk: Chunk, work: Callable[[], None], name: str) -> Job:
        """What the next fetch of ``chunk`` waits for."""
        self._engine.buffers.invalidate(chunk)
        chunk.update = job = self._worker(chunk).job(work, name)
        return job

    def _worker(self, chunk: Chunk) -> HostWorker:
        worker = self._engine.stream_worker if chunk.streamed else self._engine.worker
        assert worker is not None
        return worker

    def _queue(self, turns: Iterable[Turn]) -> None:
        """Give the workers their jobs in the order of need."""
        made = list[Turn]()
        try:
            for turn in turns:
                made.append(turn)
        finally:  # what was made is queued, in the order of need
            on_host = [turn for turn in made if not turn.chunk.streamed]
            self._engine.worker.submit(functools.partial(self._ahead.look, on_host))
            for turn in made:
                self._worker(turn.chunk).queue(turn.job)
            for turn in reversed(made):  # as the next backward needs the room for their gradients
                if turn.states is not None:
                    self._engine.worker.queue(turn.states)
        # No job of theirs says so: each may have been run ahead.
        self._all_done = [worker.submit(lambda: None) for worker in self._engine.workers]

    def _pieces(self, chunk: Chunk) -> list[Piece]:
        """Neighbouring parameters that have a gradient and share hyperparameters and the number of steps."""
        runs: list[tuple[int, int, int, int]] = []
        for member in chunk.members:
            if member.group < 0 or not self._engine.gradients.present[member.index]:
                continue
            stop = member.offset + -(-member.numel // 128) * 128
            key = (member.group, self.steps[member.index] + 1)
            if runs and runs[-1][1] == member.offset and runs[-1][2:] == key:
                runs[-1] = (runs[-1][0], stop, *key)
            else:
                runs.append((member.offset, stop, *key))
        return [(slice(start, stop), self._scalars(group, step)) for start, stop, group, step in runs]

    def _scalars(self, group_index: int, step: int) -> AdamScalars:
        group = self._optimizer.param_groups[group_index]
        return adam_scalars(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            decoupled=self._decoupled or bool(group.get("decoupled_weight_decay")),
        )


def _update_on_host(
    chunk: Chunk,
    pieces: list[Piece],
    gradient: Tensor,
    scale: Scale | None,
    accumulation: Job | None,
    *,
    threads: int,
    ahead: Ahead,
    tally: Tally,
) -> None:
    if scale is not None:
        scale.ready.wait()
    if accumulation is not None:
        accumulation.wait()  # done, as it came before; but what failed to be added must not be taken for a gradient
    chunk.offloaded.wait()
    chunk.uploaded.wait()  # a forward after the last gradient (an evaluation, say) may still read the weight
    on_host = None if scale is None else scale.on_host
    with tally.counting(pieces) as aside:
        chunk.step(pieces, gradient, on_host, threads=threads, between=functools.partial(aside, ahead.take))


def _holds(early: _Early, pieces: list[Piece], factor: float, version: int) -> bool:
    """Whether an early update did what a step now asks for."""
    return early.done and early.factor == factor and early.version == version and early.pieces == pieces
