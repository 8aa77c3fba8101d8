"""The torch.optim.Optimizer that the user holds: Adam and AdamW on chunks.

``step()`` returns before the offloaded updates are done. They run on the host in the order in which the next forward
needs their chunks, and a fetch waits for its own chunk alone, which leaves room for EXACT global-norm clipping between
backward and step. Reading state waits for all of it.
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
from protrain.engine.states.parameter_state import check_shapes, export_state, import_state, with_master_step
from protrain.engine.states.values import read_master, read_weight, write_weight
from protrain.engine.updates.updates import Scale, Updates
from protrain.hardware import HardwareProfile
from protrain.optim.clipping import Clipping
from protrain.optim.given import refuse_group
from protrain.optim.loss_scale import LossScale
from protrain.planning.explain.explanation import Explanation
from protrain.planning.explain.host_rate import host_gparams
from protrain.planning.plan import Plan


class ProTrainOptimizer(torch.optim.Optimizer):
    """Adam(W) over the chunks of an engine, sharing the param_groups of the user's optimizer.

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
        self.param_groups = optimizer.param_groups  # the same dicts: schedulers made before wrapping keep working
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
        """``loss.backward()``, scaled for float16 so that small gradients don't vanish."""
        if self._loss_scale is None:
            loss.backward()
            return
        with self._loss_scale.for_backward() as scale:
            (loss.float() * scale).backward()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the global 2-norm of all gradients to ``max_norm``, as torch.nn.utils.clip_grad_norm_ does.

        Returns:
            The norm before clipping: 0-d fp32 on the device, without a synchronisation.

        Raises:
            ValueError: another ``norm_type``, or a ``max_norm`` that is no positive number.
            MisuseError: there is no gradient, or updates have begun (``step_during_backward=True``).
        """
        if norm_type != 2.0:
            raise ValueError(f"norm_type must be 2.0, not {norm_type!r}")
        if not float(max_norm) > 0:
            raise ValueError(f"max_norm must be a positive number, not {max_norm!r}")
        return self._clipping.clip(max_norm, error_if_nonfinite=error_if_nonfinite)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns before the offloaded ones are done.

        Raises:
            MisuseError: no backward() came before, or a weight was edited outside full_parameters, or it is called
                inside.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._engine.begin_step()
        vars(self._wrapped)["_opt_called"] = True  # what schedulers that were made with it look for
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

        Where updates run inside backward and that raised, those that it had made are a step, which ends here.
        """
        failed = self._engine.abandon_backward()
        with self._engine.streams.computing():
            self._forget_gradients()
        if failed and self._engine.updated_inside:
            self._engine.updated_inside.clear()
            self._end_step()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards inside only accumulate (``model.no_sync()``)."""
        gradients = self._engine.gradients
        before, gradients.no_sync = gradients.no_sync, True
        try:
            yield
        finally:
            gradients.no_sync = before

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that the engine carries out."""
        return self._engine.plan

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because float16 gradients overflowed."""
        return 0 if self._loss_scale is None else self._loss_scale.skipped

    def report(self) -> Report:
        """Predicted and measured time and bytes so far."""
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
        return self.plan.explain(self._engine.profile, self.hardware, step_during_backward=self.step_during_backward)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State in the format of torch.optim.AdamW, fp32 on the CPU; 16-bit weights also have their ``master``.

        That counts where the state is loaded again at its own step (``master_step``), not after steps that another
        optimizer made with it. Of float16 it also has the loss scale.
        """
        self._engine.bindings.refuse_inside_full_parameters("the optimizer's state_dict()")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._groups.check(self.param_groups)
        numbers = {id(p): number for number, p in enumerate(p for group in self.param_groups for p in group["params"])}
        state: dict[int, dict[str, Any]] = {}
        with self._engine.quiet():
            for member in self._trainable():
                if self._updates.steps[member.index] or member.chunk.master is not None:  # no step, but bits to keep
                    state[numbers[id(member.parameter)]] = with_master_step(export_state(member, self._updates.steps))
        packed = []
        for group in self.param_groups:
            own = {key: value for key, value in group.items() if key != "params"}
            packed.append({**own, "params": [numbers[id(parameter)] for parameter in group["params"]]})
        loss_scale = {} if self._loss_scale is None else {"loss_scale": self._loss_scale.state()}
        result: dict[str, Any] = {"state": dict(sorted(state.items())), "param_groups": packed, **loss_scale}
        return self._through(self._optimizer_state_dict_post_hooks, result)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class or of torch.optim.Adam(W) returned, under any plan.

        Raises:
            ValueError: the groups or shapes are those of another model, or an option of a group is not supported.
        """
        self._engine.bindings.refuse_inside_full_parameters("the optimizer's load_state_dict()")
        self._groups.check(self.param_groups)
        state_dict = self._through(self._optimizer_load_state_dict_pre_hooks, state_dict.copy())
        groups, saved = self.param_groups, state_dict["param_groups"]
        check_options(saved)
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ValueError(
                f"the optimizer state has groups of {[len(group['params']) for group in saved]} parameters, this "
                f"optimizer of {[len(group['params']) for group in groups]}: load a state of the same model"
            )
        by_parameter = {id(member.parameter): member for member in self._trainable()}
        found: dict[int, dict[str, Any]] = {}
        for group, other in zip(groups, saved, strict=True):
            for parameter, number in zip(group["params"], other["params"], strict=True):
                member = by_parameter.get(id(parameter))
                if member is not None:
                    found[member.index] = state_dict["state"].get(number, {})
                    check_shapes(member, found[member.index])
        for group, other in zip(groups, saved, strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})
        with self._engine.quiet():
            for index, tensors in found.items():
                import_state(self._engine.members[index], self._updates.steps, tensors)
            self._engine.weights_changed(self._engine.chunks)
        if self._loss_scale is not None and "loss_scale" in state_dict:
            self._loss_scale.load(state_dict["loss_scale"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def adopt_state(self) -> None:
        """Take over the state of the optimizer that was wrapped."""
        known = self._wrapped.state
        found = [(member, known[member.parameter]) for member in self._trainable() if member.parameter in known]
        for member, tensors in found:
            check_shapes(member, tensors)
        with self._engine.quiet():
            for member, tensors in found:
                import_state(member, self._updates.steps, tensors)
            self._engine.weights_changed([member.chunk for member, _ in found])
        known.clear()

    def trains(self, model: nn.Module) -> bool:
        """Whether its parameters are those of ``model``, or of what that encloses."""
        return {id(member.parameter) for member in self._engine.members} <= set(map(id, model.parameters()))

    def parameter_names(self) -> list[str]:
        """Names of all managed parameters, in definition order."""
        return list(self._by_name)

    def export_parameter(self, name: str) -> dict[str, Tensor]:
        """All state of one parameter as CPU copies, so that a checkpoint never holds the whole model twice.

        Trainable: ``master``, ``exp_avg``, ``exp_avg_sq`` (fp32, the parameter's shape) and ``step``; frozen:
        ``weight``.
        """
        self._engine.bindings.refuse_inside_full_parameters("export_parameter()")
        member = self._by_name[name]
        with self._engine.quiet():
            if member.group < 0:
                return {"weight": read_weight(member)}
            return {"master": read_master(member), **export_state(member, self._updates.steps)}

    def check_parameter(self, name: str, tensors: Mapping[str, Any]) -> None:
        """ValueError where :meth:`import_parameter` could not set ``tensors``, of which shapes are enough."""
        member = self._by_name.get(name)
        if member is None:
            raise ValueError(f"the model has no parameter {name!r}: load a checkpoint of the same model")
        check_shapes(member, tensors)
        if member.group < 0 and not {"weight", "master"} & set(tensors):
            raise ValueError(f"there is neither a weight nor a master of {name}: load a whole checkpoint")

    def import_parameter(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Set what :meth:`export_parameter` returned. ValueError when the name or a shape is not this model's."""
        self._engine.bindings.refuse_inside_full_parameters("import_parameter()")
        self.check_parameter(name, tensors)
        member = self._by_name[name]
        with self._engine.quiet():
            if "weight" in tensors:
                write_weight(member, tensors["weight"])
            elif member.group < 0:  # it was trained when it was saved
                write_weight(member, tensors["master"])
            if member.group >= 0:
                import_state(member, self._updates.steps, tensors)
            self._engine.weights_changed([member.chunk])

    def scalar_state(self) -> dict[str, Any]:
        """Everything else: hyperparameters of the groups, whose they are, and the loss scale, as JSON values."""
        return {
            "param_groups": [{key: group[key] for key in group if key != "params"} for group in self.param_groups],
            "parameters": self._groups.names(self.param_groups),
            "loss_scale": None if self._loss_scale is None else self._loss_scale.state(),
        }

    def check_scalar_state(self, state: dict[str, Any]) -> None:
        """ValueError where :meth:`load_scalar_state` could not set ``state``."""
        if len(state["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(state['param_groups'])} parameter groups, this optimizer {len(self.param_groups)}"
            )
        check_options(state["param_groups"])
        self._groups.check_names(self.param_groups, state.get("parameters", []))  # the first states have none

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """Set what :meth:`scalar_state` returned."""
        self.check_scalar_state(state)
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({key: tuple(value) if key == "betas" else value for key, value in saved.items()})
        if self._loss_scale is not None and state.get("loss_scale") is not None:
            self._loss_scale.load(state["loss_scale"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are fixed by wrapping; MisuseError afterwards."""
        if hasattr(self, "_engine"):
            refuse_group(param_group)
        super().add_param_group(param_group)

    # -- inside --------------------------------------------------------------------------------------------------------

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
                f"backward brings the gradient of {self._engine.members[index].name} just now: set it to None once it "
                "is over, or register a hook that does before protrain.wrap"
            )
        gradients.forgotten.add(index)
        if not gradients.pending and len(gradients.forgotten) == sum(gradients.present):
            self.zero_grad()

    def _check_hyperparameters(self) -> None:
        self._groups.check(self.param_groups)
        check_options(self.param_groups)  # they may have been set, or loaded, since wrapping
        self._updates.check_hyperparameters()

    def _forget_gradients(self) -> None:
        self._engine.gradients.reset()
        self._updates.forget()
        self._clipping.reset()

    def _backward_begins(self) -> None:
        # Not for autograd.grad, which brings no gradients of a step.
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
            self._engine.bindings.refuse_edits()  # here step() would be too late
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
        """What gradients are multiplied with: ``factor`` of clipping, and ``unscaling`` for the loss scale."""
        if self._loss_scale is not None:
            inverse = torch.full((), unscaling, dtype=torch.float32, device=self._engine.device)
            factor = inverse if factor is None else factor * inverse
        return None if factor is None else self._updates.publish(factor)
