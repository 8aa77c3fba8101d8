"""state_dict and load_state_dict of a wrapped model, and full_parameters.

``state_dict`` of the model or any part of it has the names, shapes and dtypes of the unwrapped model. Its tensors are
copies on the CPU. ``load_state_dict`` writes straight into chunks.

With several ranks all of them must call each of these. state_dict and full_parameters give every rank whole weights,
and load_state_dict must be given the same ones on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from typing_extensions import override

from protrain.common.errors import MisuseError
from protrain.common.parameters import same_bytes
from protrain.distributed.agreement import raised_on_all
from protrain.distributed.ranks import Ranks
from protrain.engine.engine import Engine
from protrain.engine.states.chunks import Member
from protrain.engine.states.parameter_state import read_weight, read_weights, write_weight
from protrain.engine.weights.parameter import PresentParameter
from protrain.engine.weights.released import ReleasedParameter, end_full, make_full


class _Exported(ReleasedParameter):
    """A parameter inside state_dict() or load_state_dict(): ``detach`` returns a copy on the CPU, ``copy_`` loads.

    One that Ctrl-C has left like this is like all others again when its unit runs.
    """

    @override
    def intercept(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hooks: StateHooks = self.protrain_handle.engine.state_hooks
        if func is Tensor.detach:
            return hooks.export(self.protrain_handle.index)
        if func is Tensor.copy_:
            hooks.load(self.protrain_handle.index, args[1])
            return self
        return super().intercept(func, args, kwargs)


class StateHooks:
    """The hooks of state_dict() and load_state_dict() on every module."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._outermost: nn.Module | None = None  # whose state_dict() or load_state_dict() runs
        self._copies: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # made for the outermost state_dict()
        self.kept: dict[int, Tensor] = {}  # copies of weights that the first rank has inside first_rank_saves
        by_parameter = {id(member.parameter): member for member in engine.members}
        for module in engine.model.modules():
            own = [by_parameter[id(p)] for p in module.parameters(recurse=False) if id(p) in by_parameter]
            module.register_state_dict_pre_hook(partial(self._begin, own))
            module.register_state_dict_post_hook(partial(self._end, own))
            module.register_load_state_dict_pre_hook(partial(self._begin_load, own))
            module.register_load_state_dict_post_hook(partial(self._end, own))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.engine.members[0].parameter.__reduce_ex__(protocol)  # the error names the remedy

    def export(self, index: int) -> Tensor:
        """A copy of a weight on the CPU. Tied names in one state_dict have the same copy."""
        copy = self.kept.get(index)
        if copy is None:
            copy = self._copies.get(index)
        if copy is None:
            copy = self._copies[index] = read_weight(self.engine.members[index])
        return copy

    def load(self, index: int, value: Tensor) -> None:
        """Write a weight from a state_dict."""
        member = self.engine.members[index]
        write_weight(member, value)
        self.engine.weights_changed([member.chunk])

    def _begin(self, members: list[Member], module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._outermost is None or not prefix:  # it is no call for a part of that
            self._outermost = module
            self._copies.clear()
            if not keep_vars and not self.kept:  # inside first_rank_saves one rank calls it alone
                self._meet(module, "state_dict()")
        if members and not keep_vars:
            self._enter(members)

    def _meet(self, module: nn.Module, what: str) -> None:
        """All ranks must have called ``what`` of ``module``, if that has weights of which each has a part."""
        if any(isinstance(parameter, PresentParameter) for parameter in module.parameters()):
            self.engine.memory.ranks.meet(what)

    def _begin_load(
        self,
        members: list[Member],
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        if self._outermost is None or not prefix:
            self._outermost = module
            self._meet(module, "load_state_dict()")
            self.engine.refuse_write("load_state_dict()")
        if not members:
            return
        if local_metadata.get("assign_to_params_buffers"):
            raise MisuseError("load_state_dict(assign=True) would take parameters out of ProTrain: use assign=False")
        self._enter(members)

    def _enter(self, members: list[Member]) -> None:
        with self.engine.quiet():
            for member in members:
                if member.index not in self.engine.bindings.full:  # full_parameters gives a copy of its own
                    member.parameter.__class__ = _Exported

    def _end(self, members: list[Member], module: nn.Module, *_: Any) -> None:
        """The end of either call for ``module``."""
        if self._outermost is module:
            self._outermost = None
        for member in [member for member in members if type(member.parameter) is _Exported]:
            member.parameter.__class__ = PresentParameter if member.bound else ReleasedParameter


@contextmanager
def full_parameters(module: nn.Module | nn.Parameter) -> Iterator[None]:
    """Give every parameter of ``module`` its full weight on the CPU, for reading or editing. Edits are written back.

    ``module`` is a wrapped model, any part of one, or one parameter. Inside, its parameters are copies of their 16-bit
    (or fp32) weights on the CPU, so pass one part of a large model at a time, and in every step only the parameter that
    is edited. The model cannot run inside.

    With several ranks all of them must enter and leave it, and make the same edits.

    Raises:
        ValueError: ``module`` is not wrapped, or a parameter was given another shape, and no edit is kept.
        MisuseError: not all ranks have entered, their edits differ, or a hook has edited weights inside a forward or
            backward, and no edit is kept.
    """
    engine, members = members_of(module, "full_parameters")
    engine.memory.ranks.meet("full_parameters()")
    with engine.quiet():
        # An outer full_parameters may have some of them already.
        members = [member for member in members if member.index not in engine.bindings.full]
        copies = read_weights(members)
        given_out = [copy.clone() for copy in copies]
    try:
        for member, full in zip(members, given_out, strict=True):
            engine.bindings.full.add(member.index)
            make_full(member.parameter, full)
        yield
    finally:
        given = [member.parameter.data for member in members]
        for member in members:
            engine.bindings.full.discard(member.index)  # not all are there if an interrupt came in the loop above
            end_full(member.parameter)
        with raised_on_all(engine.memory.ranks):
            edits = _find_edits(members, copies, given)
        _refuse_other_edits(engine.memory.ranks, edits)
        if edits:
            engine.refuse_write("an edit of weights, which is not kept,")
            for member, value in edits:
                write_weight(member, value)
            engine.weights_changed([member.chunk for member, _ in edits])


def _find_edits(members: list[Member], copies: list[Tensor], given: list[Tensor]) -> list[tuple[Member, Tensor]]:
    """The parameters whose values were edited, with their values. A ValueError names one of another shape."""
    found = []
    for member, copy, data in zip(members, copies, given, strict=True):
        value = data.to("cpu").to_dense()
        if value.shape != member.shape:
            raise ValueError(
                f"{member.name} was given the shape {tuple(value.shape)}, not {tuple(member.shape)}: no edit of this "
                "full_parameters is kept"
            )
        if not same_bytes(value, copy):
            found.append((member, value))
    return found


def _refuse_other_edits(ranks: Ranks, edits: list[tuple[Member, Tensor]]) -> None:
    """MisuseError on every rank if their edits differ: each would keep its own in its part of a parameter."""
    if not ranks.several:
        return
    values = ((member.name, value.contiguous().view(-1).view(torch.uint8)) for member, value in edits)
    sums = ranks.all_values({name: zlib.crc32(value.numpy().data) for name, value in values})
    for rank, other in enumerate(sums):
        different = sorted(name for name in other.keys() | sums[0].keys() if other.get(name) != sums[0].get(name))
        if different:
            raise MisuseError(
                f"rank {rank} has edited {different[0]} inside full_parameters otherwise than rank 0: make the same "
                "edits on every rank. No edit of this full_parameters is kept"
            )


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` on the first rank, and an empty dict on all others, which hold one parameter at a time.

    With several ranks all of them must call it. ``module`` is a wrapped model or any part of one.
    """
    engine, _ = members_of(module, "full_state_dict")
    engine.bindings.refuse_inside_full_parameters("full_state_dict()")
    with first_rank_saves(module, what="full_state_dict()"):
        return module.state_dict() if engine.memory.ranks.rank == 0 else {}


@contextmanager
def first_rank_saves(module: nn.Module, *, what: str) -> Iterator[None]:
    """Inside, the first rank alone may call ``state_dict()`` of ``module`` and its parts, as libraries do that save.

    With several ranks all of them must enter it. The first one holds a copy of every weight meanwhile, and the others
    one at a time. ``module`` is a wrapped model, a part of one, or a model that is not wrapped. ``what`` names
    the call of the user in errors.
    """
    if not any(isinstance(parameter, PresentParameter) for parameter in module.parameters()):
        yield
        return
    engine, members = members_of(module, "first_rank_saves")
    ranks, kept = engine.memory.ranks, engine.state_hooks.kept
    try:
        if ranks.several:
            ranks.meet(what)
            with engine.quiet():
                for member in members:
                    copy = read_weight(member)
                    if ranks.rank == 0:
                        kept[member.index] = copy
        yield
    finally:
        kept.clear()


@contextmanager
def reads_of_all(module: nn.Module) -> Iterator[None]:
    """Inside, parameters may be read with several ranks as with one, where each rank has a part of them.

    Every rank must read the same parameters in the same order, and gets each as a whole, one at a time. A read that not
    all make raises a MisuseError within seconds. ``module`` is a model that is wrapped, or is not yet.
    """
    engine = next((p.protrain_handle.engine for p in module.parameters() if isinstance(p, PresentParameter)), None)
    if engine is None or engine.collective_reads:
        yield
        return
    engine.collective_reads = True
    try:
        yield
    finally:
        engine.collective_reads = False


def members_of(module: nn.Module | nn.Parameter, what: str) -> tuple[Engine, list[Member]]:
    """The engine and the parameters of ``module``. ValueError if it is not wrapped, which ``what`` needs."""
    parameters = module.parameters() if isinstance(module, nn.Module) else (module,)
    handles = [p.protrain_handle for p in parameters if isinstance(p, PresentParameter)]
    if not handles:
        raise ValueError(
            f"{what} needs a model that protrain.wrap returned, or a part of one, and was given a "
            f"{type(module).__name__}. A model that was wrapped without example_batch must be called on a training "
            "batch first"
        )
    engine: Engine = handles[0].engine
    return engine, [engine.members[handle.index] for handle in handles]
