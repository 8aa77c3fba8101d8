"""The torch.optim.Optimizer that the user holds: Adam and AdamW on chunks.

``step()`` returns before the offloaded updates are done. They run on the host in the order in which the next forward
needs their chunks, and each fetch waits only for its own chunk. That leaves room for exact global-norm clipping between
backward and step. Reading state waits for all updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.engine.engine import Engine
from protrain.engine.report import Report, StepClock, make_report
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.states.groups import Groups, check_options
from protrain.engine.states.parameter_state import check_shapes, export_state, import_state
from protrain.engine.states.values import read_master, read_weight, write_weight
from protrain.engine.updates.updates import Scale, Updates
from protrain.hardware import HardwareProfile
from protrain.optim.clipping import Clipping
from protrain.optim.loss_scale import LossScale
from protrain.optim.torch_state import match_state, pack_state
from protrain.optim.user_optimizer import refuse_group
from protrain.planning.explain.explanation import Explanation, explain
from protrain.planning.explain.host_rate import host_gparams
from protrain.planning.plan import Plan


class ProTrainOptimizer(torch.optim.Optimizer):
    """Adam or AdamW over the chunks of an engine, sharing the param_groups of the user's optimizer.

    Hyperparameters are read from ``param_groups`` when ``step`` is called, so every scheduler works.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        *,
        step_during_backward: bool,
        device_bytes: int,
        hardware: HardwareProfile,
    ) -> None:
        super().__init__([{"params": group["params"]} for group in optimizer.param_groups], optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the same dicts, so schedulers made before wrapping keep working
        vars(self).update({name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")})
        self._wrapped = optimizer
        self._engine = engine
        self._updates = Updates(engine, self, decoupled=isinstance(optimizer, torch.optim.AdamW))
        self._groups = Groups(self.param_groups, engine.members)
        self._by_name = {member.name: member for member in engine.members}
        self.step_during_backward = step_during_backward
        self._loss_scale = LossScale() if engine.dtype is torch.float16 else None
        self._clipping = Clipping(engine, self._loss_scale, refused=step_during_backward)
        self._device_bytes = device_bytes
        self.hardware = hardware
        self._clock = StepClock()
        self._predicted_host_gparams: float | None = None
        engine.backward_begins = self._backward_begins
        engine.gradients_arrived = self._gradients_arrived
        engine.backward_ends = self._backward_ends
        engine.forget_gradient = self._forget_gradient

    # -- the training step ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Run ``loss.backward()``, with the loss scaled in float16 so that small gradients don't vanish."""
        if self._loss_scale is None:
            loss.backward()
            return
        with self._loss_scale.for_backward() as scale:
            (loss.float() * scale).backward()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the global 2-norm of all gradients to ``max_norm``, as torch.nn.utils.clip_grad_norm_ does.

        Returns:
            The norm before clipping, as a 0-d fp32 tensor on the device, without a synchronisation.

        Raises:
            ValueError: ``norm_type`` is not 2, or ``max_norm`` is no positive number.
            MisuseError: there is no gradient, or updates have begun (``step_during_backward=True``).
        """
        if norm_type != 2.0:
            raise ValueError(f"norm_type must be 2.0, not {norm_type!r}")
        if not float(max_norm) > 0:
            raise ValueError(f"max_norm must be a positive number, not {max_norm!r}")
        return self._clipping.clip(max_norm, error_if_nonfinite=error_if_nonfinite)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns before the offloaded updates are done.

        Raises:
            MisuseError: no backward() came before, a weight was edited outside full_parameters, or step() was called
                inside it.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._engine.begin_step()
        vars(self._wrapped)["_opt_called"] = True  # schedulers that were made with it look for this
        if self.step_during_backward:
            if not self._engine.updated_inside:
                self._clipping.need_gradients("step()")
                raise MisuseError("step() after no_sync() only: run the last backward() of a step outside no_sync()")
            self._engine.updated_inside.clear()
            self._end_step()
            return result
        self._clipping.need_gradients("step()")
        self._check_hyperparameters()
        factor = self._clipping.coefficient()
        if self._loss_scale is not None and not self._loss_scale.update(self._clipping.is_finite()):
            self._clock.tick(updated=False)
            return result
        used = 1.0 if self._loss_scale is None else 1.0 / self._loss_scale.used
        self._updates.step(self._gradient_scale(factor, used), assumed=used)
        self._end_step()
        return result

    def _end_step(self) -> None:
        self._engine.steps += 1
        self._engine.prefetch_next_forward()
        self._clock.tick(updated=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. ``set_to_none`` is accepted for compatibility: they are always None afterwards.

        If updates run inside backward and that raised an exception, the updates made so far count as a step, which ends
        here.
        """
        failed = self._engine.abandon_backward()
        with self._engine.streams.computing():
            self._forget_gradients()
        if failed and self._engine.updated_inside:
            self._engine.updated_inside.clear()
            self._end_step()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Make backwards inside only accumulate gradients (``model.no_sync()``)."""
        gradients = self._engine.gradients
        before, gradients.no_sync = gradients.no_sync, True
        try:
            yield
        finally:
            gradients.no_sync = before

    # -- information ---------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that the engine executes."""
        return self._engine.plan

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because float16 gradients overflowed."""
        return 0 if self._loss_scale is None else self._loss_scale.skipped

    def report(self) -> Report:
        """The predicted and the measured time and bytes so far."""
        if self._predicted_host_gparams is None:
            self._predicted_host_gparams = host_gparams(
                self.plan, self._engine.profile, self.hardware, step_during_backward=self.step_during_backward
            )
        return make_report(
            self._engine,
            self._clock,
            self._updates.tally,
            device_bytes=self._device_bytes,
            predicted_host_gparams=self._predicted_host_gparams,
        )

    def explain(self) -> Explanation:
        """What limits the plan, what each of its numbers would change, and what more memory would buy."""
        return explain(self.plan, self._engine.profile, self.hardware, step_during_backward=self.step_during_backward)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of torch.optim.AdamW: fp32 on the CPU. 16-bit weights also have their ``master``.

        The master is used only if the state is loaded at the step at which it was saved (``master_step``), and not
        after steps that another optimizer made with it. In float16 the state also has the loss scale.
        """
        self._engine.bindings.refuse_inside_full_parameters("the optimizer's state_dict()")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._groups.check(self.param_groups)
        with self._engine.quiet():
            result = pack_state(self.param_groups, self._trainable(), self._updates.steps)
        if self._loss_scale is not None:
            result["loss_scale"] = self._loss_scale.state()
        return self._through(self._optimizer_state_dict_post_hooks, result)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class or of torch.optim.Adam(W) returned, under any plan.

        Raises:
            ValueError: the groups or shapes are those of another model, or an option of a group is not supported.
        """
        self._engine.bindings.refuse_inside_full_parameters("the optimizer's load_state_dict()")
        self._groups.check(self.param_groups)
        state_dict = self._through(self._optimizer_load_state_dict_pre_hooks, state_dict.copy())
        check_options(state_dict["param_groups"])
        found = match_state(self.param_groups, self._trainable(), state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self._import(found)
        if self._loss_scale is not None and "loss_scale" in state_dict:
            self._loss_scale.load(state_dict["loss_scale"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def adopt_state(self) -> None:
        """Take over the state of the wrapped optimizer."""
        known = self._wrapped.state
        found = [(member, known[member.parameter]) for member in self._trainable() if member.parameter in known]
        for member, tensors in found:
            check_shapes(member, tensors)
        self._import(found)
        known.clear()

    def _import(self, found: list[tuple[Member, Any]]) -> None:
        with self._engine.quiet():
            for member, tensors in found:
                import_state(member, self._updates.steps, tensors)
            self._engine.weights_changed([member.chunk for member, _ in found])

    def trains(self, model: nn.Module) -> bool:
        """Whether the optimizer's parameters are those of ``model``, or of a module that contains the wrapped model."""
        return {id(member.parameter) for member in self._engine.members} <= set(map(id, model.parameters()))

    def parameter_names(self) -> list[str]:
        """The names of all managed parameters, in definition order."""
        return list(self._by_name)

    def export_parameter(self, name: str) -> dict[str, Tensor]:
        """All state of one parameter as CPU copies, so that a checkpoint never holds the whole model twice.

        A trainable parameter has ``master``, ``exp_avg`` and ``exp_avg_sq`` (fp32, in the parameter's shape) and
        ``step``. A frozen one has ``weight``.
        """
        self._engine.bindings.refuse_inside_full_parameters("export_parameter()")
        member = self._by_name[name]
        with self._engine.quiet():
            if member.group < 0:
                return {"weight": read_weight(member)}
            return {"master": read_master(member), **export_state(member, self._updates.steps)}

    def check_parameter(self, name: str, tensors: Mapping[str, Any]) -> None:
        """Raise a ValueError if :meth:`import_parameter` could not set ``tensors``.

        Their shapes are enough to check.
        """
        member = self._by_name.get(name)
        if member is None:
            raise ValueError(f"the model has no parameter {name!r}: load a checkpoint of the same model")
        check_shapes(member, tensors)
        if member.group < 0 and not {"weight", "master"} & set(tensors):
            raise ValueError(f"there is neither a weight nor a master of {name}: load a whole checkpoint")

    def import_parameter(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Set what :meth:`export_parameter` returned. A ValueError names a wrong name or shape."""
        self._engine.bindings.refuse_inside_full_parameters("import_parameter()")
        self.check_parameter(name, tensors)
        member = self._by_name[name]
        with self._engine.quiet():
            if "weight" in tensors:
                write_weight(member, tensors["weight"])
            elif member.group < 0:  # it was trainable when it was saved
                write_weight(member, tensors["master"])
            if member.group >= 0:
                import_state(member, self._updates.steps, tensors)
            self._engine.weights_changed([member.chunk])

    def scalar_state(self) -> dict[str, Any]:
        """The rest of the state as JSON values: the groups' hyperparameters and parameter names, and the loss scale."""
        return {
            "param_groups": [{key: group[key] for key in group if key != "params"} for group in self.param_groups],
            "parameters": self._groups.names(self.param_groups),
            "loss_scale": None if self._loss_scale is None else self._loss_scale.state(),
        }

    def check_scalar_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError if :meth:`load_scalar_state` could not set ``state``."""
        if len(state["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(state['param_groups'])} parameter groups, this optimizer {len(self.param_groups)}"
            )
        check_options(state["param_groups"])
        # the first states of this format have no names
        self._groups.check_names(self.param_groups, state.get("parameters", []))

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """Set what :meth:`scalar_state` returned."""
        self.check_scalar_state(state)
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({key: tuple(value) if key == "betas" else value for key, value in saved.items()})
        if self._loss_scale is not None and state.get("loss_scale") is not None:
            self._loss_scale.load(state["loss_scale"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which is possible only before wrapping. Afterwards it raises a MisuseError."""
        if hasattr(self, "_engine"):
            refuse_group(param_group)
        super().add_param_group(param_group)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _through(self, hooks: Mapping[int, Callable[..., Any]], state: dict[str, Any]) -> dict[str, Any]:
        for hook in hooks.values():
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def _trainable(self) -> Iterable[Member]:
        return (member for member in self._engine.members if member.group >= 0)

    def _forget_gradient(self, index: int) -> None:
        gradients = self._engine.gradients
        if not gradients.present[index]:
            raise MisuseError(
                f"backward is just computing the gradient of {self._engine.members[index].name}: set it to None when "
                "backward is over, or in a hook that is registered before protrain.wrap"
            )
        gradients.forgotten.add(index)
        if not gradients.pending and len(gradients.forgotten) == sum(gradients.present):
            self.zero_grad()

    def _check_hyperparameters(self) -> None:
        self._groups.check(self.param_groups)
        check_options(self.param_groups)  # they may have been set or loaded since wrapping
        self._updates.check_hyperparameters()

    def _forget_gradients(self) -> None:
        self._engine.gradients.reset()
        self._updates.forget()
        self._clipping.reset()

    def _backward_begins(self) -> None:
        # This is not called for autograd.grad, which computes no gradients of a step.
        if self._clipping.has_begun:
            raise MisuseError(
                "backward() after clip_grad_norm_(): clip once, after the last backward() of a step, or zero_grad()"
            )
        if self._engine.gradients.forgotten:
            self._clipping.need_gradients("backward()")
        if self._loss_scale is not None and not self._loss_scale.is_used:
            raise MisuseError(
                "float16 needs a scaled loss: call optimizer.backward(loss) in place of loss.backward(), and no "
                "torch.amp.GradScaler"
            )
        if self._engine.updated_inside:
            raise MisuseError(
                "backward() before step(): with step_during_backward=True the last backward has made its updates, so "
                "every step() must be called; use `with model.no_sync():` for backwards that only accumulate"
            )
        if self.step_during_backward:
            self._check_hyperparameters()
            self._engine.bindings.refuse_edits()  # step() would be too late
        if not self._engine.gradients.no_sync:
            self._groups.check(self.param_groups)
            self._updates.backward_begins()

    def _gradients_arrived(self, chunks: list[Chunk]) -> None:
        self._clipping.gradients_arrived()
        gradients = self._engine.gradients
        if gradients.no_sync:
            return
        for chunk in chunks:
            if not all(member.index in gradients.delivered for member in chunk.members):
                continue
            if not self.step_during_backward:
                self._updates.speculate(chunk, 1.0 if self._loss_scale is None else 1.0 / self._loss_scale.used)
            elif not self._engine.in_use(chunk):
                self._updates.update_inside(chunk)
                self._engine.updated_inside.add(chunk.index)

    def _backward_ends(self) -> None:
        if not self.step_during_backward or self._engine.gradients.no_sync:
            return
        for chunk in self._engine.chunks:
            if chunk.index not in self._engine.updated_inside and self._updates.has_gradients(chunk):
                self._updates.update_inside(chunk)
                self._engine.updated_inside.add(chunk.index)
        self._updates.backward_ends()
        self._forget_gradients()

    def _gradient_scale(self, factor: Tensor | None, unscaling: float) -> Scale | None:
        """The factor of all gradients in the update: ``factor`` of clipping times ``unscaling`` of the loss scale."""
        if self._loss_scale is not None:
            inverse = torch.full((), unscaling, dtype=torch.float32, device=self._engine.device)
            factor = inverse if factor is None else factor * inverse
        return None if factor is None else self._updates.publish(factor)
