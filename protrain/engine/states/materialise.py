"""Weights into chunks: from a model in memory, from safetensors, or from the initialisers of the model.

What stays outside of chunks, such as buffers, begins with the values of the first rank, as weights do.

One parameter at a time is whole and never the model, because a model that fits only when its states are spread over
device and host must never exist in one place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from protrain.common.parameters import fingerprint, is_managed, kept_beside, made_of
from protrain.distributed.ranks import Ranks
from protrain.engine.states.chunks import Member
from protrain.engine.states.initialisers import exchange, held_storages, start_of, start_value
from protrain.engine.states.parameter_state import write_master, write_weight
from protrain.engine.states.weight_files import WeightSources, reading, unmanaged
from protrain.engine.weights.parameter import mark_moved


def fill(
    members: list[Member],
    model: nn.Module,
    *,
    weights: WeightSources | None,
    device: torch.device,
    show: Callable[[str, float], None],
) -> None:
    """Give every member its value, and free the parameter's own memory as soon as it is copied.

    Parameters without memory stay so until all have their values, so that no initialiser can read what is in a chunk.

    ``show`` is called with the name of each parameter and the share of elements that are done.

    Raises:
        ValueError: a weight file cannot be read any more, or a start value cannot be made.
    """
    done, total = 0, sum(member.numel for member in members)

    def write_and_free(member: Member, value: Tensor) -> None:
        nonlocal done
        (write_weight if member.group < 0 else write_master)(member, value)
        if not member.parameter.is_meta:
            _drop(member)
        done += member.numel
        show(member.name, done / total)

    remaining = members if weights is None else _load(members, model, weights, write_and_free)
    others, held = _other_than_first(remaining), held_storages(model)
    # Parameters whose values initialisers make come first, while what the others hold is still there.
    for member in sorted(remaining, key=lambda member: start_of(member.parameter) is None):
        value = member.parameter.data
        if start_of(member.parameter) is not None:
            value = start_value(member.parameter, member.name, device, held)
        if member.index in others:
            value = value.detach().to("cpu", copy=True).contiguous()
            member.chunk.ranks.broadcast(value, f"the start values of {member.name}")
        write_and_free(member, value)
    for member in members:
        if member.parameter.is_meta:
            _drop(member)


def _load(
    members: list[Member], model: nn.Module, weights: WeightSources, write: Callable[[Member, Tensor], None]
) -> list[Member]:
    """Give every member, and every buffer that ``weights`` have, its value from there.

    Returns:
        The members that got no value, because the model says that files may lack them.
    """
    by_name, others = {member.name: member for member in members}, unmanaged(model)
    with reading(tensor for source in weights.sources for tensor in source.stored) as read, torch.no_grad():
        for source in weights.sources:
            values = source.values(read)
            for name in source.names:
                if name in by_name:
                    write(by_name.pop(name), values[name])
                else:
                    others[name].copy_(values[name])
    return list(by_name.values())


def _other_than_first(members: list[Member]) -> set[int]:
    """The members whose start values on any rank are not those of the first rank, which all ranks then take.

    Models that several processes build may come from several seeds. Those that were read from the same files are alike,
    so that nothing needs to be sent. Of those without values the seeds become those of the first rank.
    """
    if not members or not members[0].chunk.ranks.several:
        return set()
    ranks = members[0].chunk.ranks
    starts = [start for member in members if (start := start_of(member.parameter)) is not None]
    for start, seed in zip(starts, ranks.of_first([start.seed for start in starts], "the seeds"), strict=True):
        start.seed = seed
    made = [member for member in members if start_of(member.parameter) is None]
    differ = _differ([member.parameter.data for member in made], ranks)
    return {member.index for member, does in zip(made, differ, strict=True) if does}


def start_as_first(model: nn.Module, ranks: Ranks) -> None:
    """Give the buffers of ``model`` and its unmanaged parameters the values that they have on the first rank.

    Raises:
        MisuseError: the ranks have others, or of other shapes.
    """
    if not ranks.several:
        return
    tensors = {n: p for n, p in (*model.named_buffers(), *model.named_parameters()) if not is_managed(p)}
    parts = {
        name: part
        for outer, tensor in tensors.items()
        for name, part in (made_of(tensor, outer) | kept_beside(tensor, outer)).items()
        if not part.is_meta
    }
    ranks.agree("buffer", [(name, tuple(part.shape), str(part.dtype)) for name, part in parts.items()])
    for (name, part), does in zip(parts.items(), _differ(list(parts.values()), ranks), strict=True):
        if does:
            value = part.detach().to("cpu", copy=True).contiguous()
            ranks.broadcast(value, f"the start values of {name}")
            with torch.no_grad():
                part.copy_(value)


def _differ(values: list[Tensor], ranks: Ranks) -> list[bool]:
    """Whether each of ``values`` on any rank is not that of the first rank."""
    every = ranks.all_values([fingerprint(value) for value in values], "the comparison of start values")
    return [len(set(found)) > 1 for found in zip(*every, strict=True)]


def _drop(member: Member) -> None:
    """Free the parameter's own memory. It becomes a view of its chunk when the engine is installed."""
    parameter, weight = member.parameter, member.chunk.weight
    with torch.no_grad():
        if parameter.is_meta:  # a tensor cannot leave the meta device by assigning its data
            exchange(parameter, nn.Parameter(weight.new_empty(0), requires_grad=parameter.requires_grad))
        mark_moved(parameter)
        parameter.data = weight.new_empty(()).expand(member.shape)
