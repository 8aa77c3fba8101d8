"""Runs units: where a step is in the schedule of their visits, and what several ranks do together at each visit.

A visit is one call of a unit in forward, or the backward of that call. At each visit chunks are fetched ahead, by the
schedule. One rank goes to the visits that it really makes. Several ranks go through all visits of the schedule, one
after the other: see [Note: one order].

[Note: one order] All ranks must issue the same gathers and reductions in the same order, whatever units each of them
runs and however long that takes. So the order is that of the schedule, which all ranks know. A rank that skips visits
makes up for them before its next one: it gathers the weights with the others, and reduces gradients that it does not
have. It also assigns and evicts buffers as if it had run the unit, so that all ranks have the same chunks in buffers.
If a unit runs more often in forward than in the profiled step, all ranks go through the forward once more. A unit that
the profiled step never called has no place in the order: all ranks end the forward of the schedule before it.

The chunks of a unit that encloses others stay in their buffers while the others are visited, in backward from its begin
to its end, as autograd goes to and fro between the enclosing unit and those inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

from protrain.common.errors import MisuseError
from protrain.engine.activations.saved import Frame
from protrain.engine.activations.swap import frame_of
from protrain.engine.streams import span
from protrain.engine.units import ManagedModel, Unit
from protrain.engine.weights.bindings import Bindings, copy_escaping_weights, refuse_leaked_views
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.handle import Engine
from protrain.forward.dispatch import RuntimeMode
from protrain.planning.schedule import Schedule
from protrain.planning.timeline import GPU


class Visits:
    """The visits of this rank to the units of ``managed``, in steps of ``engine``."""

    def __init__(self, managed: ManagedModel, engine: Engine) -> None:
        units, calls = managed.units, managed.profile.calls
        fetched = [[chunk.index for chunk in unit.chunks if not chunk.resident] for unit in units]
        self._training = Schedule([*calls, *reversed(calls)], fetched)
        self._inference = Schedule(calls, fetched)
        self._engine = engine
        self._managed = managed
        self._buffers: BufferPool = engine.buffers
        self._bindings: Bindings = engine.bindings
        self._ranks = managed.memory.ranks
        self._several = self._ranks.several
        self.schedule = self._training  # the one that is followed now
        self.backward_start = len(calls)  # the first visit of backward
        self._within = [unit.within for unit in managed.profile.units]  # by unit, the units that enclose it
        # By unit, the one that forward calls just before the first call of it: backward reaches that next.
        self._unit_before = {unit: before for before, unit in reversed([*pairwise(calls)])}
        # With one rank no unit is held, and there is nothing to make up for.
        self._enclosing = managed.profile.enclosing if self._several else ()
        self._held: list[Unit] = []  # enclosing units whose chunks stay in their buffers
        self._reduced = -1  # the last visit whose gradients are reduced
        self.running = 0  # how many forwards of units run now, one inside the other; a hook in them may save the model
        self._current: Unit | None = None  # the unit whose backward runs
        self.current_frame: Callable[[], Frame | None] = _no_frame  # a weak reference to the call in its forward

    # -- running units -------------------------------------------------------------------------------------------------

    def run(self, unit: Unit, function: Callable[..., Any], around: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` with the parameters of ``unit`` on the device.

        It is the forward of the unit, or with ``around`` what is around that: hooks of the user, which may use the
        parameters before and after it. Tensors that the hooks save are neither recomputed nor swapped, as hooks must
        run once.
        """
        engine, bindings, buffers = self._engine, self._bindings, self._buffers
        bindings.refuse_inside_full_parameters(f"the forward of {unit.label}")
        engine.reset()
        self._enter_forward(unit)
        if not around:
            args, kwargs = copy_escaping_weights((args, kwargs), buffers, own=unit)
        engine.unfinished += 1
        bindings.bind(unit, self.schedule)
        self._prefetch()
        running = self.running
        try:
            self.running = running + 1
            with RuntimeMode() if torch._C._len_torch_dispatch_stack() else nullcontext():  # it counts all writes
                if not torch.is_grad_enabled():
                    output = function(*args, **kwargs)
                elif around:
                    with Frame(engine, unit).hooks():
                        output = function(*args, **kwargs)
                else:
                    output = frame_of(engine, unit).run(function, args, kwargs)
            output = copy_escaping_weights(output, buffers)
        finally:
            self.running = running
            bindings.unbind(unit)
            engine.unfinished -= 1
        if torch.is_grad_enabled():
            refuse_leaked_views(unit, buffers)
        if not around:
            self._gather_ahead()
        return output

    def enter_backward(self, frame: Frame) -> None:
        """Begin the backward of the call that ``frame`` stands for, and end that of the unit before."""
        unit = frame.unit
        if self._current is not unit:
            self._leave_backward()
            is_visit = unit.index not in self._enclosing
            # The chunks of an enclosing unit are there, and its gradients are reduced after those of the units inside.
            if is_visit:
                self._enter_backward(unit)
            self._bindings.bind(unit, self.schedule)
            self._current = unit
            self._span = span(GPU, f"backward {unit.label}")
            self._span.__enter__()
            if is_visit:
                self._prefetch()
                self._gather_ahead()
            before = self._unit_before.get(unit.index)
            if before is not None and not self._engine.in_forward:
                self._engine.swaps.fetch_ahead(self._managed.units[before])
        self.current_frame = weakref.ref(frame)

    def end_backward(self) -> None:
        """End the backward of the model: leave the last unit, and make up for the visits that are left."""
        self._leave_backward()
        self._make_up_rest()

    def _leave_backward(self) -> None:
        """End the backward of a unit: release it, and reduce the gradients that have arrived into chunks."""
        self.abandon_backward()
        if not self._several or self.schedule.position > self._reduced:
            self._engine.updates.arrived(self._engine.gradients.flush(self.schedule.position))
            self._reduced = self.schedule.position

    def abandon_backward(self) -> None:
        """Release the unit whose backward runs, if there is one."""
        self.current_frame = _no_frame
        unit, self._current = self._current, None
        if unit is not None:
            self._bindings.unbind(unit)
            self._span.__exit__(None, None, None)

    # -- the schedule --------------------------------------------------------------------------------------------------

    def begin_forward(self, *, training: bool) -> None:
        """A forward of the model begins, or comes next after a step: fetch the chunks that it needs first."""
        self._make_up_rest()
        self._ranks.note("a forward" if training else "a forward under torch.no_grad()")
        self.schedule = self._training if training else self._inference
        self.schedule.restart()
        self._prefetch()

    def _enter_forward(self, unit: Unit) -> None:
        if self._current is not None:  # inside a backward, in a checkpoint of the user's own
            if self._several:
                raise MisuseError(
                    f"{unit.label} runs inside backward, in a checkpoint that is not ProTrain's, for which several "
                    "ranks have no order: call the module without it, as ProTrain recomputes what it must"
                )
            # The current unit must free its buffers for this one, unless it encloses it.
            if self._current.index not in self._within[unit.index]:
                self._leave_backward()
        if self._several:
            if self.schedule.skipped(unit.index) is None:  # it runs more often than in the profiled step
                self._make_up_rest()
                self.schedule.restart()
                self._ranks.note("a forward")
            skipped = self.schedule.skipped(unit.index)
            if skipped is None:  # such as the head of a model whose loss takes its weight, and whose generate calls it
                if torch.is_grad_enabled():
                    raise MisuseError(
                        f"{unit.label} was not called in the profiled step, so the ranks have no order for its "
                        "backward: pass an example_batch to protrain.wrap with which every unit is called, or call it "
                        "under torch.no_grad()"
                    )
                self._ranks.note(f"the forward of {unit.label}")  # all ranks are between two forwards
                return
            for visit in skipped:
                self._make_up(visit)
            self._release_left(unit)
        self.schedule.enter(unit.index)

    def _prefetch(self) -> None:
        """Fetch the chunks of later visits, as far as buffers are free."""
        self._buffers.prefetch(self._managed.chunks, self.schedule)

    def _gather_ahead(self) -> None:
        """The ranks gather the weights of the next visit."""
        if self._several and self.schedule.position + 1 < len(self.schedule.visits):
            self._buffers.make_whole(self._managed.units[self.schedule.visits[self.schedule.position + 1]].chunks)

    def begin_backward(self) -> None:
        """A backward begins."""
        self.schedule = self._training
        if not self._several:
            return
        if self.schedule.position < self.backward_start:
            self._make_up_rest()
        self.schedule.position = self._reduced = self.backward_start - 1
        self._ranks.note("a backward")
        for outer in self._enclosing:
            self._buffers.acquire(self._managed.units[outer].chunks, self.schedule)
            self._held.append(self._managed.units[outer])

    def _enter_backward(self, unit: Unit) -> None:
        skipped = self.schedule.skipped(unit.index, start=self.backward_start) if self._several else ()
        if skipped is None:
            raise MisuseError(
                f"backward reaches {unit.label} once more than in the profiled step, for which several ranks have no "
                "order: call backward() once for each forward, or wrap a module whose forward makes all calls of the "
                "model and returns the loss; and leave checkpointing to ProTrain"
            )
        for visit in skipped:
            self._make_up(visit)
        self.schedule.enter(unit.index, start=self.backward_start)

    def reset(self) -> None:
        """No unit uses any chunk any more."""
        self._held.clear()

    def _make_up(self, visit: int) -> None:
        """Do what the other ranks do together in a visit that this rank skips."""
        self.schedule.position = visit
        unit = self._managed.units[self.schedule.visits[visit]]
        self._release_left(unit)
        self._buffers.acquire(unit.chunks, self.schedule)
        self._prefetch()
        if visit >= self.backward_start:
            self._gather_ahead()
            self._release(unit)
            self._leave_backward()
        elif unit.index in self._enclosing:
            self._held.append(unit)
        else:
            self._release(unit)
            self._gather_ahead()

    def _make_up_rest(self) -> None:
        """Make up for the visits that are left of this forward or backward, and release the units that enclose them."""
        position = self.schedule.position
        if self._several and position >= 0:
            last = self.backward_start if position < self.backward_start else len(self.schedule.visits)
            for visit in range(position + 1, last):
                self._make_up(visit)
        while self._held:
            self._release(self._held.pop())

    def _release_left(self, entered: Unit) -> None:
        """Forward enters a unit: release the units that enclosed others, but not it. Backward keeps them all."""
        if self.schedule.position < self.backward_start:
            for outer in [held for held in self._held if held.index not in self._within[entered.index]]:
                self._held.remove(outer)
                self._release(outer)

    def _release(self, unit: Unit) -> None:
        for chunk in unit.chunks:
            self._buffers.release(chunk)


def _no_frame() -> None:
    """Stands for a dead reference."""
