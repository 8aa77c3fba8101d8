"""A training step from its first gradient to its update: its phase, and what may happen in each.

[Note: phases] A step goes through these phases and no others:

    EMPTY      no gradient is there
    BACKWARD   a backward brings gradients
    READY      gradients are there: another backward may add to them, and a factor or the update may use them
    SCALED     the gradients have a factor, so that no backward may add to them
    UPDATED    the last backward has made the updates: step() comes next
    CUT_SHORT  a backward raised an exception after it had made some updates: step() or zero_grad() comes next

Updates are made inside backward only with ``step_during_backward=True``; the last two phases exist only there. As in
torch, step() leaves gradients where they are, and zero_grad() forgets them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.gradients.clipping import Clipping
from protrain.engine.gradients.gradients import Gradients, Settings
from protrain.engine.gradients.loss_scale import LossScale
from protrain.engine.states.chunks import Chunk
from protrain.engine.states.groups import Groups
from protrain.engine.states.state import State
from protrain.engine.units import ManagedModel
from protrain.engine.updates.host_updates import Scale
from protrain.engine.updates.updates import Updates
from protrain.engine.weights.bindings import Bindings
from protrain.engine.weights.buffers import BufferPool


class Phase(State):
    """What has happened in a step so far. See [Note: phases]."""

    EMPTY = "empty", "backward", "empty"
    BACKWARD = "backward", "ready", "scaled", "updated", "cut short", "empty"  # scaled: by a hook; empty: it has failed
    READY = "ready", "backward", "scaled", "empty"
    SCALED = "scaled", "scaled", "empty"
    UPDATED = "updated", "empty"
    CUT_SHORT = "cut short", "empty"


class Step:
    """The step that runs now. It decides when gradients are used, and by what."""

    def __init__(
        self,
        managed: ManagedModel,
        *,
        groups: Groups,
        gradients: Gradients,
        updates: Updates,
        buffers: BufferPool,
        bindings: Bindings,
        step_during_backward: bool,
    ) -> None:
        self.updates = updates
        self._groups = groups
        self.loss_scale = LossScale() if gradients.dtype is torch.float16 else None
        self.clipping = Clipping(gradients, self.loss_scale)
        self.updated_inside: set[int] = set()  # chunks that backward has updated, until step() is called
        self.phase = Phase.EMPTY
        self._scale: Scale | None = None  # on the gradients of the last step
        self._chunks = managed.chunks
        self._gradients = gradients
        self._buffers = buffers
        self._bindings = bindings
        self._inside = step_during_backward  # updates are made inside backward, not by step()
        self._zeroed = set[int]()  # parameters to whose gradients zero_grad(set_to_none=False) leaves zeros in torch
        self._ranks = managed.memory.ranks

    def _go_to(self, new: Phase) -> None:
        self.phase = self.phase.become(new)

    # -- backward ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """The first gradient of a backward has arrived. MisuseError if no backward may come now."""
        # This is not called for autograd.grad, which computes no gradients of a step.
        if self.phase is Phase.SCALED:
            raise MisuseError(
                "backward() after clip_grad_norm_(): clip once, after the last backward() of a step, or zero_grad()"
            )
        if self._gradients.forgotten:
            self.refuse_missing_gradients("backward()")
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
        self._gradients.count_backward()
        if self._inside:
            self._groups.check()
            self._bindings.refuse_lent("backward() with step_during_backward=True")
            self._bindings.refuse_edits()  # step() would be too late
        if not self._gradients.no_sync:
            self._groups.check_members()
            self.updates.begin_backward()
        self._go_to(Phase.BACKWARD)

    def settings(self) -> Settings:
        """What an update of this step would use, and the last one did, to be compared with that of other ranks."""
        try:
            scalars = self._groups.all_scalars()
        except ValueError:  # step() raises it, unless the hyperparameter is corrected until then
            scalars = None
        return Settings(scalars, self._groups.texts(), None if self._scale is None else self._scale.value)

    def take_gradients(self, visit: int) -> None:
        """Backward leaves ``visit`` of the schedule: bring its gradients into chunks, and begin what can begin now."""
        arrived = self._gradients.flush(visit)
        if arrived:
            self.clipping.forget_norms()
        if self._gradients.no_sync:
            return
        for chunk in arrived:
            if self._inside:
                # A missing gradient may come later, or the backward may yet be refused. All ranks call agree().
                if self._gradients.agree(chunk) and not self._buffers.in_use(chunk):
                    self._update_inside(chunk)
            elif chunk.speculates and self._gradients.has_all(chunk):
                self.updates.speculate(chunk, self._unscaling())

    def end_backward(self) -> None:
        """The backward is over."""
        if not self._inside or self._gradients.no_sync:
            self._go_to(Phase.SCALED if self.clipping.has_begun else Phase.READY)
            return
        for chunk in self._chunks:
            if chunk.index not in self.updated_inside and self._gradients.has_gradients(chunk):
                self._update_inside(chunk)
        self.updates.end_backward()
        self._forget()
        self._go_to(Phase.UPDATED if self.updated_inside else Phase.EMPTY)

    def abandon_backward(self) -> None:
        """The backward has raised an exception. Gradients that it has brought into chunks stay."""
        if self.phase is Phase.BACKWARD:
            left = Phase.READY if any(self._gradients.present) else Phase.EMPTY
            self._go_to(Phase.CUT_SHORT if self.updated_inside else left)

    def _update_inside(self, chunk: Chunk) -> None:
        self._gradients.host_gradients.send(chunk)
        self.updates.update_inside(chunk)
        self.updated_inside.add(chunk.index)

    def settle(self) -> None:
        """Wait until all updates are done. MisuseError in a backward that has updated some weights and not the others.

        A hook or a signal handler that saves then would save neither the old nor the new model.
        """
        if self.phase is Phase.BACKWARD and self.updated_inside:
            raise MisuseError(
                "with step_during_backward=True this backward has updated a part of the weights, so the model cannot "
                "be read, saved or written now: do it between steps, and let a signal handler only set a flag for the "
                "training loop"
            )
        self.updates.wait()

    # -- between backward and step() -----------------------------------------------------------------------------------

    def refuse_missing_gradients(self, what: str, index: int | None = None) -> None:
        """Raise a MisuseError if the gradients that ``what`` needs are missing.

        With ``index`` it needs the gradient of that parameter. In any case it also raises if some gradients were set to
        None and others were not.
        """
        members, present = self._gradients.members, self._gradients.present
        forgotten = self._gradients.forgotten
        if not (any(present) if index is None else present[index]):
            name = "gradients" if index is None else f"the gradient of {members[index].name}"
            raise MisuseError(f"{what} without {name}: call loss.backward() first")
        if forgotten:
            raise MisuseError(
                f"{what} after .grad of {len(forgotten)} parameters was set to None, of "
                f"{members[min(forgotten)].name} among them, and that of others was not: clear all of them "
                "with optimizer.zero_grad(), and set requires_grad=False for parameters that are not to be trained"
            )

    def clip(self, max_norm: float, *, error_if_nonfinite: bool) -> Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``. Returns the norm before, 0-d and fp32."""
        self._refuse_inside("clip_grad_norm_()")
        norm = self.clipping.clip(max_norm, error_if_nonfinite=error_if_nonfinite)
        self._note_factor()
        return norm

    def gradient_norm(self, index: int) -> Tensor:
        """The 2-norm of the gradient of parameter ``index``: a 0-d fp32 tensor on the device."""
        self._refuse_inside("the norm of a gradient", index)
        return self.clipping.gradient_norm(index)

    def multiply_gradient(self, index: int, factor: Tensor | float) -> None:
        """Multiply the gradient of parameter ``index`` by a number or a 0-d tensor."""
        self._refuse_inside("to multiply a gradient", index)
        self.clipping.multiply_gradient(index, factor)
        self._note_factor()

    def _note_factor(self) -> None:
        """The gradients have a factor now, so that no backward may add to them."""
        if self.phase is not Phase.BACKWARD:  # a hook inside backward: see end_backward
            self._go_to(Phase.SCALED)

    def _refuse_inside(self, what: str, index: int | None = None) -> None:
        if self._inside:
            raise MisuseError(
                f"{what} with step_during_backward=True, whose updates are made inside backward: wrap with "
                "step_during_backward=False, which overlaps updates too"
            )
        self.refuse_missing_gradients(what, index)

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def update(self) -> bool:
        """Update every parameter that has a gradient. Returns whether weights have changed.

        Raises:
            MisuseError: there are no gradients.
            ValueError: a hyperparameter is invalid.
        """
        if self._inside:
            self._end_updated_inside()
            return True
        self.refuse_missing_gradients("step()")
        self._refuse_zeros()
        self._groups.check()
        factor, unscaling = self.clipping.factor(), self._unscaling()
        self._ranks.note("step() without clipping" if factor is None else "step() after clipping")
        if self.loss_scale is not None:
            if not self.loss_scale.update(self.clipping.is_finite()):
                return False
            inverse = torch.full((), unscaling, dtype=torch.float32, device=self._gradients.device)
            factor = inverse if factor is None else factor * inverse
        self._scale = None if factor is None else self.updates.publish(factor)
        self._gradients.host_gradients.send_all()
        self.updates.step(self._scale, assumed_factor=unscaling)
        return True

    def _end_updated_inside(self) -> None:
        """End a step whose updates backward has made. MisuseError if it has made none."""
        if self.phase not in (Phase.UPDATED, Phase.CUT_SHORT):
            self.refuse_missing_gradients("step()")
            raise MisuseError("step() after no_sync() only: run the last backward() of a step outside no_sync()")
        self._ranks.note("step()")
        self._gradients.backwards = 0
        self.updated_inside.clear()
        self._go_to(Phase.EMPTY)

    def _refuse_zeros(self) -> None:
        """MisuseError if torch would now update a parameter by zeros, which zero_grad(set_to_none=False) leaves there.

        Adam moves such a parameter on by its momentum and its weight decay, and no zeros are kept here.
        """
        for index in sorted(self._zeroed):
            if not self._gradients.present[index]:
                raise MisuseError(
                    f"no backward() has reached {self._gradients.members[index].name} in this step, and "
                    "zero_grad(set_to_none=False) would leave it a gradient of zeros, by which Adam moves it on. "
                    "ProTrain keeps no such gradients: call zero_grad() without set_to_none=False, so that parameters "
                    "without a gradient stay as they are"
                )

    def forget(self, *, zeros: bool) -> bool:
        """Forget all gradients (``zero_grad``). Returns whether that ends a step whose backward was cut short.

        With ``zeros`` the script expects zeros in their place. MisuseError if backward has used the gradients up.
        """
        if zeros and self._inside:
            raise MisuseError(
                "zero_grad(set_to_none=False) with step_during_backward=True, where backward uses gradients up and "
                "none is left to be zero: call zero_grad() without set_to_none=False"
            )
        self._zeroed = self._zeroed | self._gradients.indices() if zeros else set()
        self._forget()
        ends = self.phase is Phase.CUT_SHORT
        if ends:
            self.updated_inside.clear()
        if self.phase not in (Phase.BACKWARD, Phase.UPDATED):
            self._go_to(Phase.EMPTY)
        return ends

    def _forget(self) -> None:
        self._gradients.reset()
        self.updates.forget()
        self.clipping.reset()

    def _unscaling(self) -> float:
        """The factor on gradients that undoes the loss scale."""
        return 1.0 if self.loss_scale is None else 1.0 / self.loss_scale.used
