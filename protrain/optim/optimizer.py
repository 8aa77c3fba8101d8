"""The torch.optim.Optimizer that the user holds: Adam and AdamW on chunks.

``step()`` returns before the offloaded updates are done. They run on the host in the order in which the next forward
needs their chunks, and each fetch waits only for its own chunk. That leaves room for exact global-norm clipping between
backward and step. Reading state waits for all updates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.distributed.ranks import Ranks
from protrain.engine.engine import Engine
from protrain.engine.gradients.clipping import LossScale
from protrain.engine.report import Report, StepClock, make_report
from protrain.engine.states import parameter_state
from protrain.engine.states.groups import Groups, check_options
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import other_machines
from protrain.optim.states import FirstCall, StatesInChunks, match_state
from protrain.planning.answer import Answer, alternatives, explain
from protrain.planning.plan import Plan
from protrain.planning.predict import host_gparams


class ProTrainOptimizer(torch.optim.Optimizer):
    """Adam or AdamW over the chunks of an engine, sharing the param_groups of the user's optimizer.

    Hyperparameters are read from ``param_groups`` when ``step`` is called, so every scheduler works.

    Where ``protrain.wrap`` is given no example batch, there is no engine before the first call of the model. Until
    then groups can be read and changed, and a state can be loaded, which goes to the engine when that is attached.

    Args:
        optimizer: of the user.
        parameters: all managed parameters by name, in definition order.
        ranks: the processes that train together.
    """

    _collect: Callable[[], Any] | None = None  # what gives the states to ``state_dict`` of torch, while that runs

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], *, ranks: Ranks
    ) -> None:
        super().__init__([{"params": group["params"]} for group in optimizer.param_groups], optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the same dicts, so schedulers made before wrapping keep working
        vars(self).update({name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")})
        self.ranks = ranks
        self.groups = Groups(
            self,
            {id(parameter): name for name, parameter in parameters.items()},
            decoupled=isinstance(optimizer, torch.optim.AdamW),
        )
        self._wrapped = optimizer  # it has the states of parameters until there is an engine
        self._parameters = dict(parameters)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad and id(p) in held}
        self._clock = StepClock()
        self._running: Engine | None = None  # None: the model was not called yet
        self.first_call = FirstCall(parameters)
        for name, parameter in self._trained.items():
            parameter_state.check_state(name, parameter.shape, optimizer.state.get(parameter, {}))

    def attach(self, engine: Engine, *, hardware: HardwareProfile) -> None:
        """Train with ``engine`` from now on. It has the chunks of all parameters and was planned for ``hardware``."""
        self._running = engine
        self.hardware = hardware
        self._by_name = {member.name: member for member in engine.members}
        try:
            states = self._wrapped.state
            self.import_parts((name, None, states[p]) for name, p in self._trained.items() if p in states)
            self.first_call.carry_out()
        except BaseException:  # such as a checkpoint that is gone: no step() may train what was not loaded
            self._running = None
            raise
        self._wrapped.state = StatesInChunks()

    def on_attach(self, action: Callable[[], None], *, loads: nn.Module | None = None) -> None:
        """Do ``action``, which needs the engine: now, or when there is one. ``loads`` is that of ``FirstCall.add``."""
        if self._running is not None:
            action()
        else:
            self.first_call.add(action, loads=loads)

    # -- the training step ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Run ``loss.backward()``, with the loss scaled in float16 so that small gradients don't vanish."""
        loss_scale = self._engine.loss_scale
        if loss_scale is None:
            loss.backward()
            return
        with loss_scale.for_backward() as scale:
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
        return self._engine.clipping_for("clip_grad_norm_()").clip(max_norm, error_if_nonfinite=error_if_nonfinite)

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
            if result is None and not any(self._engine.gradients.present):
                return None  # a closure without a loss, such as Lightning's for a training_step that leaves out a batch
        vars(self._wrapped)["_opt_called"] = True  # schedulers that were made with it look for this
        self._clock.tick(updated=self._engine.update())
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. They are None afterwards, whatever ``set_to_none`` says.

        In torch ``set_to_none=False`` leaves zeros, by which Adam moves parameters on. A step raises a MisuseError if
        that would make a difference: if it has no gradient for a parameter that had one when this was called. With
        ``step_during_backward=True`` this method raises it.

        If updates run inside backward and that raised an exception, the updates made so far count as a step, which ends
        here.
        """
        if self._running is None:
            for parameter in self._parameters.values():  # a part of the model may have been called alone
                parameter.grad = None
        elif self._running.forget_gradients(zeros=not set_to_none):
            self._clock.tick(updated=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backwards inside only accumulate gradients. The last backward() of a step goes outside."""
        before, self.groups.no_sync = self.groups.no_sync, True
        try:
            yield
        finally:
            self.groups.no_sync = before

    # -- information ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """An error for whoever reads or clears it, as states lie in chunks. Inside ``state_dict`` the states."""
        return StatesInChunks() if self._collect is None else self._collect()

    @state.setter
    def state(self, value: Any) -> None:
        if "param_groups" in vars(self):  # torch sets an empty state before these
            StatesInChunks().update(value)

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
        return make_report(self._engine, self._clock, predicted_host_gparams=self._predicted_host_gparams)

    @cached_property
    def _predicted_host_gparams(self) -> float:
        return host_gparams(self.plan, self._engine.profile, self.hardware)

    def explain(self) -> Answer:
        """What limits the plan, what each of its numbers would change, and how fast other machines would be."""
        profile = self._engine.profile
        others = alternatives(profile, self.hardware, other_machines(self.hardware))
        return replace(explain(self.plan, profile, self.hardware), alternatives=others)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of torch.optim.AdamW: fp32 on the CPU. 16-bit weights also have their ``master``.

        With several ranks all of them must call it, and each gets the whole state.

        The master is used only if the state is loaded at the step at which it was saved (``master_step``), and not
        after steps that another optimizer made with it. In float16 the state also has the loss scale.
        """
        return self._state_dict("the optimizer's state_dict()", kept=True)

    def full_state_dict(self) -> dict[str, Any]:
        """``state_dict`` on the first rank, and an empty dict on all others, which hold one parameter at a time.

        With several ranks all of them must call it.
        """
        return self._state_dict("the optimizer's full_state_dict()", kept=self.ranks.rank == 0)

    def _state_dict(self, what: str, *, kept: bool) -> dict[str, Any]:
        """The state of the optimizer, empty if it is not ``kept``, as this rank only takes part in the collectives."""
        self.first_call.refuse_pending_load(what)
        self.groups.check_members()
        self.ranks.meet(what)
        self._collect = partial(self._states, kept=kept)
        try:
            result = super().state_dict()
        finally:
            self._collect = None
        if self._loss_scale is not None:
            result["loss_scale"] = self._loss_scale.state()
        return result if kept else {}

    def _states(self, *, kept: bool) -> Mapping[Tensor, Mapping[str, Any]]:
        """The states by parameter. If they are not ``kept``, this rank only takes part in the collectives."""
        if self._running is None:
            return self._wrapped.state
        self._running.bindings.refuse_inside_full_parameters("the optimizer's state_dict()")
        states = dict[Tensor, Mapping[str, Any]]()
        with self._running.quiet():
            for name, parameter in self._trained.items():
                member = self._by_name[name]
                # Before its first step a parameter has state to keep only if it has a master.
                if member.steps or member.chunk.master is not None:
                    state = parameter_state.export_state(member)
                    if kept:
                        states[parameter] = state
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class or of torch.optim.Adam(W) returned, under any plan.

        With several ranks all of them must call it, with the same whole state.

        Raises:
            ValueError: the groups or shapes are those of another model, the states are not those of Adam, or an option
                of a group is not supported. Nothing is loaded then.
        """
        if self._running is not None:
            self._running.bindings.refuse_inside_full_parameters("the optimizer's load_state_dict()")
            self._running.refuse_write("the optimizer's load_state_dict()")
        self.first_call.refuse_pending_load("the optimizer's load_state_dict()")
        self.groups.check_members()
        self.ranks.meet("the optimizer's load_state_dict()")
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_options(state_dict["param_groups"])
        found = match_state(self.param_groups, self._trained, state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        if self._running is None:
            self._wrapped.state = defaultdict(dict, {self._trained[name]: state for name, state in found.items()})
        else:
            self.import_parts((name, None, state) for name, state in found.items())
        self.on_attach(partial(self._load_loss_scale, state_dict.get("loss_scale")))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def start_again(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget all states, and train with the groups of ``optimizer``, which was made anew of the same parameters.

        Schedulers of ``optimizer`` work from then on, and it shares the groups with this one.

        Raises:
            ValueError: it is of another class than the one that was wrapped, or has the parameters in other groups.
        """
        held = [[id(parameter) for parameter in group["params"]] for group in self.param_groups]
        new = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        if type(optimizer) is not type(self._wrapped) or new != held:
            raise ValueError(
                f"the model was wrapped with {type(self._wrapped).__name__} of {len(held)} groups, and goes on with an "
                f"optimizer of that kind and of the same groups only, not with {type(optimizer).__name__} of {len(new)}"
            )
        self.load_state_dict(optimizer.state_dict())
        optimizer.param_groups = self.param_groups
        if self._running is not None:
            optimizer.state = StatesInChunks()
        self._wrapped = optimizer

    def _load_loss_scale(self, state: dict[str, Any] | None) -> None:
        if self._loss_scale is not None and state is not None:
            self._loss_scale.load(state)

    def trains(self, model: nn.Module) -> bool:
        """Whether the optimizer's parameters are those of ``model``, or of a module that contains the wrapped model."""
        return set(map(id, self._parameters.values())) <= set(map(id, model.parameters()))

    def scalar_state(self) -> dict[str, Any]:
        """The rest of the state as JSON values: the groups' hyperparameters and parameter names, and the loss scale."""
        loss_scale = self._engine.loss_scale
        return {**self.groups.state(), "loss_scale": None if loss_scale is None else loss_scale.state()}

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """Set what ``scalar_state`` returned, which ``groups.check_state`` has accepted."""
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({key: tuple(value) if key == "betas" else value for key, value in saved.items()})
        self.on_attach(partial(self._load_loss_scale, state.get("loss_scale")))

    # -- states of single parameters, by which checkpoints never hold the whole model a second time --------------------

    def parameter_names(self) -> list[str]:
        """The names of all managed parameters, in definition order."""
        return list(self._parameters)

    def export_parameter(self, name: str) -> dict[str, Tensor]:
        """All state of one parameter as CPU copies, so that a checkpoint never holds the whole model twice.

        A trainable parameter has ``master``, ``exp_avg`` and ``exp_avg_sq`` (fp32, in the parameter's shape) and
        ``step``. A frozen one has ``weight``. With several ranks all of them must call it.
        """
        self._engine.bindings.refuse_inside_full_parameters("export_parameter()")
        self.ranks.meet("export_parameter()")
        with self._engine.quiet():
            return parameter_state.export_parameter(self._by_name[name])

    def export_parts(self, names: Iterable[str]) -> Iterator[tuple[str, parameter_state.Part]]:
        """What this rank has of all state of the parameters ``names``, in place. Other ranks need not call it.

        Until it is read or copied, the model must not be trained.
        """
        self._engine.bindings.refuse_inside_full_parameters("a save of states")
        with self._engine.quiet():
            for name in names:
                yield name, parameter_state.export_part(self._by_name[name])

    def local_elements(self, name: str) -> slice:
        """The elements of a parameter whose state this rank has, in the order of a contiguous tensor."""
        return parameter_state.local_elements(self._by_name[name])

    def check_parameter(self, name: str, tensors: Mapping[str, Any]) -> None:
        """Raise a ValueError if ``import_parts`` could not set ``tensors``, of which only the shapes count."""
        parameter_state.check_shapes(name, self._parameters[name].shape, tensors)
        if name not in self._trained and not {"weight", "master"} & set(tensors):
            raise ValueError(f"there is neither a weight nor a master of {name}: load a whole checkpoint")

    def import_parts(self, parts: Iterable[tuple[str, slice | None, Mapping[str, Any]]]) -> None:
        """Set elements of parameters, or all of one, to tensors as those of a ``Part``. ``parts`` begin with the names.

        With several ranks every one of them must be given at least once what it has of each parameter, though that be
        no elements, so that it learns of the step and drops the weights that it has gathered before.
        """
        self._engine.bindings.refuse_inside_full_parameters("a load of states")
        self._engine.refuse_write("a load of states")
        with self._engine.quiet():
            for name, elements, tensors in parts:
                member = self._by_name[name]
                parameter_state.import_part(member, tensors, elements)
                self._engine.weights_changed([member.chunk])

    # -- internals -----------------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        if self._running is None:
            raise MisuseError(
                "there is no plan before the first call of the model, as protrain.wrap was given no example_batch: "
                "call the model itself, and not a method or part of it, on a training batch before this, or pass "
                "example_batch to protrain.wrap"
            )
        return self._running

    @property
    def _loss_scale(self) -> LossScale | None:
        return None if self._running is None else self._running.loss_scale
