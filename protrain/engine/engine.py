"""The engine: carries out a Plan, one training step after another. It never searches and never changes the plan.

A step, in the order in which things happen:

    model forward   Inputs go to the device, and the schedule starts anew.
    unit forward    The chunks of the unit are fetched, if they are not there already, and later chunks are fetched
                    ahead. The forward runs under the frame of the unit's mode. Then the chunks are released.
    unit backward   It begins when autograd asks for the first saved tensor of the unit. Chunks are fetched, and fetched
                    ahead; so are swapped activations. It ends when the backward of another unit begins: gradients go
                    into chunks, and the chunks are released.
    end of backward The last unit backward ends.
    step            The device updates persistent chunks. The host worker updates the others, in the order in which the
                    next forward needs them; the device may update some of these, too. step() issues the first fetches
                    of the next forward and returns before the updates are done. A fetch waits for its own chunk only.

[Note: phases] A step goes through these phases and no others:

    READY      a backward may come, and adds to the gradients that are there, unless clipping has given them a factor
    BACKWARD   a backward brings gradients
    UPDATED    the last backward has made the updates: step() comes next
    CUT_SHORT  a backward raised an exception after it had made some updates: step() or zero_grad() comes next

Updates are made inside backward only with ``step_during_backward=True``; the last two phases exist only there. As in
torch, step() leaves gradients where they are, and zero_grad() forgets them and their factor.

[Note: interrupts] An exception or Ctrl-C may come between any two lines of the main thread. The engine is dirty when
it has left a backward, a begin or an end of a unit, or the end of a step unfinished. The next call of the engine then
calls ``reset``, which waits for all work under way and has no unit use any chunk. A step itself is carried out as a
whole or not at all: see [Note: commit] in updates.py. No other line is written to survive an interrupt.

A signal handler or another thread may come between any two lines, too, and call the engine. It finds the same marks,
but the function that has made them is still on the stack of its thread. Then the call is refused.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from traceback import walk_stack
from typing import Any

import torch

from protrain.common.errors import MisuseError
from protrain.engine.activations.saved import Frame, end_left_hooks
from protrain.engine.activations.swap import Swaps
from protrain.engine.gradients.clipping import Clipping
from protrain.engine.gradients.gradients import Gradients
from protrain.engine.inputs import Inputs
from protrain.engine.states.arena import HostSlots
from protrain.engine.states.chunks import Chunk, State
from protrain.engine.states.groups import Groups
from protrain.engine.units import ManagedModel
from protrain.engine.updates.updates import Updates
from protrain.engine.visits import Visits
from protrain.engine.weights.bindings import Bindings
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.parameter import (
    refuse_foreign_gradients,
    refuse_hooks_on_sums,
    take_gradient,
)
from protrain.engine.weights.views import Ledger


class Phase(State):
    """What has happened in a step so far. See [Note: phases]."""

    READY = "ready", "backward"
    BACKWARD = "backward", "ready", "updated", "cut short"
    UPDATED = "updated", "ready"
    CUT_SHORT = "cut short", "ready"


class Engine:
    """Everything that a step touches. ``protrain.engine.build.build_engine`` makes it."""

    def __init__(
        self,
        managed: ManagedModel,
        *,
        groups: Groups,
        gradients: Gradients,
        updates: Updates,
        buffers: BufferPool,
        bindings: Bindings,
        swap_slots: HostSlots,
        ledger: Ledger,
    ) -> None:
        self.model, self.profile, self.plan = managed.model, managed.profile, managed.plan
        self.chunks, self.members, self.units = managed.chunks, managed.members, managed.units
        self.memory = memory = managed.memory
        self.streams = memory.streams
        self.inputs = Inputs(memory.device, memory.streams)
        self.updates = updates
        self._groups = groups
        self.loss_scale = updates.loss_scale
        self._clipping = Clipping(gradients, self.loss_scale)
        self.phase = Phase.READY
        self.buffers = buffers
        self.gradients = gradients
        self.swaps = Swaps(swap_slots)
        self.ledger = ledger
        self.bindings = bindings
        self.state_hooks: Any = None  # which refer to this, and are made last
        self.weights_version = 0  # counts changes of weights, by optimizer steps and between them
        self.collective_reads = False  # whether every rank reads the same parameters now
        self._frozen = [member for member in managed.members if not member.parameter.requires_grad]
        self.in_forward = False  # whether the forward of the model runs: it may compute gradients of its own
        # How many units and ends of steps are under way. One whose begin or end is cut short stays counted.
        self.unfinished = 0
        self._process = os.getpid()
        self._ranks = memory.ranks
        self.visits = Visits(managed, self)
        # In the current forward every block is recomputed, and nothing is offloaded: it takes less memory than planned.
        self.recompute_all = False
        # To the callback that autograd calls at the end of backward. None: there is no backward; dead: it has raised.
        self._backward: weakref.ref[Any] | None = None

    # -- forward and backward ------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the whole model begins: fetch the chunks that it needs first.

        Raises:
            MisuseError: it is one of the training, with a parameter that was frozen when the model was wrapped.
        """
        if torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                newly_trainable = next((member for member in self._frozen if member.parameter.requires_grad), None)
            if newly_trainable is not None:
                raise MisuseError(
                    f"{newly_trainable.name} was frozen when the model was wrapped, so it has no optimizer states and "
                    "would not be trained: set requires_grad before protrain.wrap, and wrap the model anew to train "
                    "other parameters"
                )
        self.streams.refuse_another()
        self.reset()
        self._restart(training=torch.is_grad_enabled())

    def _restart(self, *, training: bool) -> None:
        """Fetch the chunks that a forward needs first."""
        self.unfinished += 1
        self.visits.begin_forward(training=training)
        self.unfinished -= 1

    def begin_backward(self) -> None:
        """Begin a backward and have autograd tell when it ends, unless one runs already: every hook calls this."""
        if self._backward is not None:
            if self._backward() is not None:  # this backward, or one around it
                return
            if self._ranks.several:
                raise MisuseError(
                    "backward() after a backward that raised an error, which other ranks have not seen: end all "
                    "processes and resume from a checkpoint"
                )
            self.visits.end_backward()  # its gradients are added, as autograd adds to ``.grad``
        self.reset()
        self.bindings.refuse_inside_full_parameters("backward()")
        refuse_hooks_on_sums(self.members, self.gradients.indices())
        end = partial(self._end_backward)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        # Without several ranks nobody else has to know that autograd drops the callback before it has called it.
        failed = (lambda _: self._ranks.raised(None, "a backward")) if self._ranks.several else None
        self._backward = weakref.ref(end, failed)
        del end  # now autograd has the only reference, and drops it when backward ends or raises
        self.visits.begin_backward()
        self.swaps.begin_backward()
        self.gradients.begin_backward()

    def in_backward_of(self, frame: Frame) -> bool:
        """True if the backward of this frame is the current one. Every saved tensor asks, so this must be fast."""
        return (
            self.visits.current_frame() is frame
            and frame.weights_version == self.weights_version
            and self._backward is not None
            and self._backward() is not None
        )

    def gradient_ready(self, index: int) -> None:
        """Autograd has accumulated the whole gradient of parameter ``index``."""
        member = self.members[index]
        gradient = take_gradient(member.parameter)  # now, as a backward that is refused must leave nothing behind
        self.begin_backward()
        if self.phase is not Phase.BACKWARD:
            self._begin_gradients()
        if gradient is not None and member.group >= 0:
            # It may be one of create_graph=True, or a sparse one of an embedding.
            known, gradient = self.gradients.pending.get(index), gradient.detach().to_dense()
            self.gradients.pending[index] = gradient if known is None else known + gradient

    def _go_to(self, new: Phase) -> None:
        self.phase = self.phase.become(new)

    def _begin_gradients(self) -> None:
        """The first gradient of a backward has arrived. MisuseError if no backward may come now."""
        # This is not called for autograd.grad, which computes no gradients of a step.
        if self._clipping.has_begun:
            raise MisuseError(
                "backward() after clip_grad_norm_(): clip once, after the last backward() of a step, or zero_grad()"
            )
        if self.loss_scale is not None and not self.loss_scale.is_used:
            raise MisuseError(
                "float16 needs a scaled loss: call optimizer.backward(loss) in place of loss.backward(), and no "
                "torch.amp.GradScaler"
            )
        if self.phase in (Phase.UPDATED, Phase.CUT_SHORT):
            raise MisuseError(
                "backward() before step(): with step_during_backward=True the last backward has made its updates, so "
                "every step() must be called; use `with model.no_sync():` for backwards that only accumulate"
            )
        self.gradients.count_backward(no_sync=self._groups.no_sync)
        if self.updates.inside:
            self._groups.check()
            self.bindings.refuse_overridden("backward() with step_during_backward=True")
            self.bindings.refuse_edits()  # step() would be too late
        if not self._groups.no_sync:
            self._groups.check_members()
            self.updates.begin_backward()
        self._go_to(Phase.BACKWARD)

    def _end_backward(self) -> None:
        with self.streams.computing():  # autograd calls this on the stream that was current in backward()
            self.visits.end_backward()
            self.gradients.combine(self.updates.settings)
            if self.phase is Phase.BACKWARD:  # torch.autograd.grad brings no gradients
                if self.updates.inside and not self._groups.no_sync:
                    self.updates.end_backward()
                    self._forget()
                self._go_to(Phase.UPDATED if self.updates.updated_inside else Phase.READY)
            self._backward = None

    def reset(self) -> None:
        """Have no unit use any chunk if an exception or Ctrl-C has left the engine dirty. See [Note: interrupts].

        Gradients that a backward had brought into chunks before it failed stay, and it counts for nothing else.

        Raises:
            MisuseError: this process was forked, and has neither the host memory of states nor the threads of updates,
                or a signal handler calls this in the middle of what would be left unfinished.
        """
        if os.getpid() != self._process:
            raise MisuseError(
                "this process was forked from the one that called protrain.wrap, and has no model states: train, read "
                "and save the model there, or call protrain.wrap in this process"
            )
        failed = self._backward is not None and (self._backward() is None or torch._C._current_graph_task_id() == -1)
        if failed or (self.unfinished and not self.visits.running):
            self._refuse_others()
        if failed:
            self.unfinished += 1
            self.visits.abandon_backward()
            self.gradients.abandon()
            if self.phase is Phase.BACKWARD:
                self._go_to(Phase.CUT_SHORT if self.updates.updated_inside else Phase.READY)
            self._backward = None
        if self.visits.running or self._backward is not None:
            return
        end_left_hooks(self.buffers)
        if self.unfinished:
            self.updates.drain()
            self.streams.synchronize()
            self.bindings.reset()
            self.visits.reset()
            self.unfinished = 0

    def _refuse_others(self) -> None:
        """MisuseError if what looks unfinished is under way in another thread, or below a signal handler."""
        own = {each.__code__ for each in (Visits.run, Engine._restart, Engine._update, Engine.weights_changed)}
        if self._backward is not None and self._backward() is not None:
            own.add(torch.autograd.graph._engine_run_backward.__code__)
        # Of this thread beyond the caller of ``reset``, which is Visits.run in a usual call.
        stacks = {**sys._current_frames(), threading.get_ident(): sys._getframe(3)}
        if any(
            frame.f_code in own and frame.f_locals.get("self", self) in (self, self.visits)
            for frame, _ in chain.from_iterable(map(walk_stack, stacks.values()))
        ):
            raise MisuseError(
                "a signal handler or another thread has used the model in the middle of a step: let the handler only "
                "set a flag for the training loop, and give other threads copies (model.state_dict())"
            )

    def gradient_pending(self, index: int) -> bool:
        """Whether parameter ``index`` has a gradient. One that a failed backward has not stored does not count."""
        self.reset()
        return index in self.gradients.pending or self.gradients.present[index]

    # -- gradients and updates -----------------------------------------------------------------------------------------

    def clipping_for(self, what: str, index: int | None = None) -> Clipping:
        """The norms and the factor of the gradients, which ``what`` reads or changes, or needs of one parameter.

        Raises:
            MisuseError: updates have used the gradients up, or there are none.
        """
        self.streams.refuse_another()
        self.reset()
        if self.updates.inside:
            raise MisuseError(
                f"{what} with step_during_backward=True, whose updates are made inside backward: wrap with "
                "step_during_backward=False, which overlaps updates too"
            )
        self.gradients.refuse_missing(what, index)
        return self._clipping

    def forget_gradients(self, *, zeros: bool = False) -> bool:
        """Forget all gradients (``zero_grad``). Returns whether that ends a step whose backward was cut short.

        With ``zeros`` the script expects zeros in their place. MisuseError if backward has used the gradients up.
        """
        self.reset()
        if zeros and self.updates.inside:
            raise MisuseError(
                "zero_grad(set_to_none=False) with step_during_backward=True, where backward uses gradients up and "
                "none is left to be zero: call zero_grad() without set_to_none=False"
            )
        self.gradients.expect_zeros(zeros)
        with self.streams.computing():
            self._forget()
        ends = self.phase is Phase.CUT_SHORT
        if ends:
            self._end_inside()
            self._restart(training=True)
        return ends

    def forget_gradient(self, index: int) -> None:
        """Forget the gradient of parameter ``index`` (``parameter.grad = None``), so that a step leaves it as it is."""
        self._ranks.note(f"the gradient of {self.members[index].name} is set to None")
        self.gradients.forget(index)
        if not any(self.gradients.present):
            self.forget_gradients()

    def update(self) -> bool:
        """Do what ``optimizer.step()`` does, and begin to fetch for the next forward.

        Returns:
            Whether weights have changed. They have not if gradients overflowed in float16.

        Raises:
            MisuseError: there are no gradients, a weight was edited, this is inside full_parameters, or the model has
                other parameters than when it was wrapped.
            ValueError: a hyperparameter is invalid.
        """
        self.streams.refuse_another()
        self.bindings.refuse_inside_full_parameters("step()")
        self.bindings.refuse_overridden("step()")
        self.reset()
        self.bindings.refuse_edits()
        refuse_foreign_gradients(self.members)
        with self._ranks.reporting("step()"):
            changed = self._end_updated_inside() if self.updates.inside else self._update()
            if changed:
                self._restart(training=True)
        return changed

    def _update(self) -> bool:
        """Update every parameter that has a gradient. Returns whether the gradients were finite."""
        self.gradients.refuse_missing("step()")
        self.gradients.refuse_zeros()
        self._groups.check()
        factor = self._clipping.factor()
        self._ranks.note("step() without clipping" if factor is None else "step() after clipping")
        if self.loss_scale is not None and not self._clipping.is_finite():
            self.loss_scale.warn_of_smallest()
            self.updates.commit(self.loss_scale.count_skipped)
            return False
        self.unfinished += 1
        self.weights_version += 1
        self.updates.step(factor)
        self.unfinished -= 1
        return True

    def _end_updated_inside(self) -> bool:
        """End a step whose updates backward has made, and return True. MisuseError if it has made none."""
        if self.phase not in (Phase.UPDATED, Phase.CUT_SHORT):
            self.gradients.refuse_missing("step()")
            raise MisuseError("step() after no_sync() only: run the last backward() of a step outside no_sync()")
        self._ranks.note("step()")
        self.gradients.backwards = 0
        self._end_inside()
        return True

    def _end_inside(self) -> None:
        self.weights_version += 1
        self.updates.updated_inside.clear()
        self._go_to(Phase.READY)

    def _forget(self) -> None:
        self.gradients.reset()
        self.updates.forget()
        self._clipping.reset()

    # -- between steps -------------------------------------------------------------------------------------------------

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which nothing of the engine runs, so that the host may read and write states."""
        self.reset()
        # Then neither the old model is there nor the new one.
        if self.phase is Phase.BACKWARD and self.updates.updated_inside:
            raise MisuseError(
                "with step_during_backward=True this backward has updated a part of the weights, so the model cannot "
                "be read, saved or written now: do it between steps, and let a signal handler only set a flag for the "
                "training loop"
            )
        self.updates.wait()
        self.streams.synchronize()
        self.bindings.refuse_edits()
        yield

    def refuse_write(self, what: str) -> None:
        """MisuseError unless ``what`` may write weights and states now."""
        self.reset()
        self.bindings.refuse_write(what)

    def weights_changed(self, chunks: list[Chunk]) -> None:
        """The weights of ``chunks`` were written outside of a step, so that their buffers are out of date."""
        self.unfinished += 1
        for chunk in chunks:
            chunk.wait()  # no step commits what was done speculatively with the weights before
            self.streams.compute.record_event(chunk.updated)
            self.buffers.invalidate(chunk)
        self.weights_version += 1
        self.unfinished -= 1
