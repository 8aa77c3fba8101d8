"""Units, where a step is in the schedule of their visits, and what several ranks do together at each visit.

A unit is a module around which chunks are fetched and released.

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

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from protrain.common.errors import MisuseError
from protrain.engine.states.arena import EngineMemory
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.parameter import PresentParameter
from protrain.forward.module_state import BlockModules
from protrain.planning.layout import Layout
from protrain.planning.plan import BlockMode, Plan
from protrain.planning.schedule import Schedule
from protrain.profiler.model_profile import ModelProfile, UnitRecord


@dataclass(eq=False)
class Unit:
    """A block, or a module outside of blocks that has parameters of its own."""

    index: int
    label: str
    module: nn.Module
    mode: BlockMode
    is_block: bool
    packs: bool  # what it swaps goes to host memory in one buffer
    chunks: list[Chunk]  # the chunks that it needs on the device
    members: list[Member]  # its parameters in those
    modules: BlockModules  # the module and all modules inside it
    calls: int = 0  # of its forward, so far
    moving: list[Member] = field(init=False)  # the members whose data lies in another buffer from time to time

    def __post_init__(self) -> None:
        self.moving = [member for member in self.members if not member.chunk.resident]


@dataclass(eq=False, kw_only=True)
class ManagedModel:
    """A model whose states lie in chunks, and what it was planned for: what all parts of an engine work on."""

    model: nn.Module
    profile: ModelProfile
    plan: Plan
    layout: Layout
    memory: EngineMemory
    chunks: list[Chunk]
    members: list[Member]  # all managed parameters
    units: list[Unit] = field(init=False)  # one for each record of the profile

    def __post_init__(self) -> None:
        self.units = [self._unit(index, record) for index, record in enumerate(self.profile.units)]

    def _unit(self, index: int, record: UnitRecord) -> Unit:
        module = self.model.get_submodule(record.name)
        return Unit(
            index=index,
            label=record.name or type(self.model).__name__,
            module=module,
            mode=BlockMode.NONE if record.block is None else self.plan.block_modes[record.block],
            is_block=record.block is not None,
            packs=record.block is not None and self.plan.packs(record.block),
            chunks=[self.chunks[chunk] for chunk in self.layout.unit_chunks[index]],
            members=[self.members[member] for member in record.parameters],
            modules=BlockModules(module, PresentParameter),
        )


class Visits:
    """The visits of this rank.

    Args:
        managed: the model.
        buffers: where chunks are fetched to.
        take_gradients: called with each visit of backward when it is over.
    """

    def __init__(self, managed: ManagedModel, *, buffers: BufferPool, take_gradients: Callable[[int], None]) -> None:
        units, calls = managed.units, managed.profile.calls
        fetched = [[chunk.index for chunk in unit.chunks if not chunk.resident] for unit in units]
        self._training = Schedule([*calls, *reversed(calls)], fetched)
        self._inference = Schedule(calls, fetched)
        self._units = units
        self._chunks = managed.chunks
        self._buffers = buffers
        self._take_gradients = take_gradients
        self._ranks = managed.memory.ranks
        self._several = self._ranks.several
        self.schedule = self._training  # the one that is followed now
        self.backward_start = len(calls)  # the first visit of backward
        self._within = [unit.within for unit in managed.profile.units]  # by unit, the units that enclose it
        # With one rank no unit is held, and there is nothing to make up for.
        self._enclosing = managed.profile.enclosing if self._several else ()
        self._held: list[Unit] = []  # enclosing units whose chunks stay in their buffers
        self._reduced = -1  # the last visit whose gradients are reduced

    def begin_forward(self, *, training: bool) -> None:
        """A forward of the model begins, or comes next after a step: fetch the chunks that it needs first."""
        self.make_up_rest()
        self._ranks.note("a forward" if training else "a forward under torch.no_grad()")
        self.schedule = self._training if training else self._inference
        self.schedule.restart()
        self.prefetch()

    def enter_forward(self, unit: Unit) -> None:
        """The forward of ``unit`` begins."""
        if self._several:
            if self.schedule.skipped(unit.index) is None:  # it runs more often than in the profiled step
                self.make_up_rest()
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

    def prefetch(self) -> None:
        """Fetch the chunks of later visits, as far as buffers are free."""
        self._buffers.prefetch(self._chunks, self.schedule)

    def gather_ahead(self) -> None:
        """The ranks gather the weights of the next visit."""
        if self._several and self.schedule.position + 1 < len(self.schedule.visits):
            self._buffers.make_whole(self._units[self.schedule.visits[self.schedule.position + 1]].chunks)

    def begin_backward(self) -> None:
        """A backward begins."""
        self.schedule = self._training
        if not self._several:
            return
        if self.schedule.position < self.backward_start:
            self.make_up_rest()
        self.schedule.position = self._reduced = self.backward_start - 1
        self._ranks.note("a backward")
        for outer in self._enclosing:
            self._buffers.acquire_all(self._units[outer].chunks, self.schedule)
            self._held.append(self._units[outer])

    def enter_backward(self, unit: Unit) -> None:
        """The backward of ``unit`` begins."""
        if unit.index in self._enclosing:
            return  # its chunks are there, and its gradients are reduced after those of the units inside
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

    def prefetch_in_backward(self, unit: Unit) -> None:
        """``prefetch`` and ``gather_ahead`` in the backward of ``unit``."""
        if unit.index not in self._enclosing:
            self.prefetch()
            self.gather_ahead()

    def leave_backward(self) -> None:
        """Backward has left a unit: bring the gradients that have arrived into chunks."""
        if not self._several or self.schedule.position > self._reduced:
            self._take_gradients(self.schedule.position)
            self._reduced = self.schedule.position

    def reset(self) -> None:
        """No unit uses any chunk any more."""
        self._held.clear()

    def _make_up(self, visit: int) -> None:
        """Do what the other ranks do together in a visit that this rank skips."""
        self.schedule.position = visit
        unit = self._units[self.schedule.visits[visit]]
        self._release_left(unit)
        self._buffers.acquire_all(unit.chunks, self.schedule)
        self.prefetch()
        if visit >= self.backward_start:
            self.gather_ahead()
            self._release(unit)
            self.leave_backward()
        elif unit.index in self._enclosing:
            self._held.append(unit)
        else:
            self._release(unit)
            self.gather_ahead()

    def make_up_rest(self) -> None:
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
