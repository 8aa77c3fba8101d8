"""Units, and the model that an engine trains: what all parts of an engine work on.

A unit is a module around which chunks are fetched and released: a block, or a module outside of blocks that has
parameters of its own. Units may lie in each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from protrain.engine.states.arena import EngineMemory
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.weights.parameter import PresentParameter
from protrain.forward.module_state import BlockModules
from protrain.planning.layout import Layout
from protrain.planning.plan import BlockMode, Plan
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
    # The chunks that lie in another buffer from time to time, each with its members.
    moving: list[tuple[Chunk, list[Member]]] = field(init=False)

    def __post_init__(self) -> None:
        chunks = [chunk for chunk in self.chunks if not chunk.resident]
        self.moving = [(chunk, [member for member in self.members if member.chunk is chunk]) for chunk in chunks]


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
