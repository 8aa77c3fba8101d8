"""Averages of the trained weights over steps (EMA), of which each rank keeps its part in host memory.

``torch.optim.swa_utils.AveragedModel`` copies the model, and a loop over its parameters makes one whole weight after
the other. Here the fp32 masters are averaged where they lie, with neither a copy of the model nor a gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real

import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.engine.engine import Engine
from protrain.engine.states.chunks import Member
from protrain.engine.states.parameter_state import local_elements, read_local_master, whole, write_master
from protrain.engine.weights.state_hooks import members_of


class AveragedWeights:
    """The exponential moving average of all trained weights of a wrapped model, in fp32.

    The first ``update`` takes the weights as they are, and later ones do ``average += (1 - decay) * (weight -
    average)``, as AveragedModel does. The bits are the same under every plan and on any number of ranks. It takes 4
    bytes of host memory for each trained parameter, divided by the number of ranks. An update waits for the updates of
    the optimizer, so call it every so many steps where these run on the host.

    Args:
        model: a wrapped model.
        decay: how much of the average an update keeps.

    Raises:
        ValueError: ``decay`` is no number from 0 (inclusive) to 1.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not isinstance(decay, (float, Real)) or not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1, not {decay!r}")
        self._model = model
        self._decay = decay
        self._local: dict[str, Tensor] = {}  # of each parameter what this rank has, 1-d

    @torch.inference_mode(False)  # which the averages must be written outside of, too
    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of now into the average. Call it on every rank.

        Ranks do not wait for each other here. If one of them calls it alone, or with another decay, all raise an error
        at the end of the next backward, or in the next call that all make.
        """
        engine, members = self._members()
        engine.memory.ranks.note(f"AveragedWeights.update() with decay={self._decay}")
        with engine.quiet():
            for member in members:
                master = read_local_master(member)
                if member.name in self._local:
                    self._local[member.name].lerp_(master, 1 - self._decay)
                else:
                    self._local[member.name] = master

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averages inside, to evaluate, save or export it, and its own weights back afterwards.

        With several ranks all of them must enter and leave it. Inside, the model cannot be trained, edited or loaded,
        as leaving would take that back.

        Raises:
            MisuseError: there was no update, or this is called from a hook inside a forward or backward.
        """
        engine, members = self._members()
        engine.memory.ranks.meet("AveragedWeights.applied()")
        if not self._local:
            raise MisuseError("there is no average yet: call update() after steps of the training")
        engine.refuse_write("AveragedWeights.applied()")
        self._exchange(engine, members)
        engine.bindings.weights_overridden_by = "AveragedWeights.applied()"
        try:
            yield
        finally:
            engine.bindings.weights_overridden_by = ""
            self._exchange(engine, members)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by name, whole. All ranks must call it, and each gets them."""
        engine, members = self._members()
        engine.memory.ranks.meet("the state_dict() of AveragedWeights")
        if not self._local:
            return {}
        return {member.name: whole(member, self._local[member.name]).clone() for member in members}

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Go on from what ``state_dict`` returned. Each rank takes its part of the whole averages.

        Raises:
            ValueError: they are those of another model.
        """
        engine, members = self._members()
        engine.memory.ranks.meet("the load_state_dict() of AveragedWeights")
        if {m.name: m.shape for m in members} != {name: value.shape for name, value in state_dict.items()}:
            raise ValueError("the averages are of another model, as their names or shapes differ")
        for member in members:
            own = state_dict[member.name].detach().float().reshape(-1)[local_elements(member)]
            self._local[member.name] = own.clone()

    def _members(self) -> tuple[Engine, list[Member]]:
        engine, members = members_of(self._model, "AveragedWeights")
        engine.bindings.refuse_inside_full_parameters("AveragedWeights")
        engine.bindings.refuse_overridden("AveragedWeights")
        return engine, [member for member in members if member.group >= 0]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _exchange(self, engine: Engine, members: list[Member]) -> None:
        """Exchange masters and averages, one parameter at a time."""
        with engine.quiet():
            for member in members:
                master = read_local_master(member)
                write_master(member, self._local[member.name], local_elements(member))
                self._local[member.name] = master
            engine.weights_changed([member.chunk for member in members])
