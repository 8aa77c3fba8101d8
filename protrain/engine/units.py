"""Units: the modules around which chunks are fetched and released, and what each needs to run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from protrain.engine.activations.module_state import BlockModules
from protrain.engine.states.chunks import Chunk, Member
from protrain.planning.layout import Layout
from protrain.planning.plan import BlockMode, Plan
from protrain.profiler.model_profile import ModelProfile


@dataclass(eq=False)
class Unit:
    """A block or an outer module with parameters of its own."""

    index: int
    label: str
    module: nn.Module
    mode: BlockMode
    chunks: list[Chunk]  # non-persistent ones that it needs
    members: list[Member]  # its parameters in those chunks
    residents: list[Member]  # its parameters in persistent chunks
    resident_chunks: list[Chunk]  # the persistent ones that it needs
    modules: BlockModules  # the module and everything in it
    calls: int = 0  # of its forward, so far


def make_units(
    model: nn.Module, profile: ModelProfile, plan: Plan, layout: Layout, chunks: list[Chunk], members: list[Member]
) -> list[Unit]:
    """One unit per record of the profile."""
    units = []
    for index, record in enumerate(profile.units):
        mode = BlockMode.NONE if record.block is None else plan.block_modes[record.block]
        module = model.get_submodule(record.name)
        units.append(
            Unit(
                index=index,
                label=record.name or type(model).__name__,
                module=module,
                mode=mode,
                chunks=[chunks[chunk] for chunk in layout.unit_chunks[index] if not chunks[chunk].persistent],
                members=[members[member] for member in record.parameters if not members[member].chunk.persistent],
                residents=[members[member] for member in record.parameters if members[member].chunk.persistent],
                resident_chunks=[chunks[chunk] for chunk in layout.unit_chunks[index] if chunks[chunk].persistent],
                modules=BlockModules(module),
            )
        )
    return units
