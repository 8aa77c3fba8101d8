"""Layout, memory model and runtime model of one search, and the plans that they predict."""

from __future__ import annotations

import numpy as np

from protrain.hardware.profile import HardwareProfile
from protrain.planning.fingerprint import fingerprint
from protrain.planning.layout import Layout
from protrain.planning.memory.model import MemoryModel
from protrain.planning.plan import BlockMode, Plan, block_modes, layout_of
from protrain.planning.runtime.model import RuntimeModel
from protrain.planning.search.moves import Moves
from protrain.profiler.model_profile import ModelProfile


class Models:
    """Layout, memory model and runtime model of one search."""

    def __init__(
        self,
        profile: ModelProfile,
        hardware: HardwareProfile,
        layout: Layout,
        step_during_backward: bool,
        *,
        keep_attention: bool = False,
        pack_swaps: tuple[bool, ...] | None = None,
    ) -> None:
        self.keep_attention = keep_attention
        self.profile = profile = profile.keeping_attention() if keep_attention else profile
        self.hardware = hardware
        self.in_backward = step_during_backward
        self.layout = layout
        self.memory = MemoryModel(
            profile, hardware, layout, update_in_backward=step_during_backward, pack_swaps=pack_swaps
        )
        self.moves = Moves(self.memory)
        self.runtime = RuntimeModel(self.memory)
        self.kinds = {  # by whether early updates make weights alone
            False: (self.memory, self.runtime),
            True: (self.memory.making_weights(), self.runtime.making_weights()),
        }

    @classmethod
    def of(cls, plan: Plan, profile: ModelProfile, hardware: HardwareProfile, step_during_backward: bool) -> Models:
        """Those that ``plan`` is one of."""
        layout = layout_of(profile, plan)
        return cls(
            profile,
            hardware,
            layout,
            step_during_backward,
            keep_attention=plan.keep_attention,
            pack_swaps=plan.pack_swaps,
        )

    def again(self, plan: Plan) -> Plan:
        """``plan`` with predictions of these models."""
        counts = plan.n_persist, plan.n_buffer, plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap
        return self.plan(
            *counts,
            plan.n_speculate,
            plan.n_stream,
            early_weights=plan.early_weights,
            n_whole=plan.n_whole,
            modes=plan.block_modes,
        )

    def plan(
        self,
        n_persist: int,
        n_buffer: int,
        n_swap: int,
        n_ckpt: int,
        n_ckpt_swap: int,
        n_speculate: int,
        n_stream: int = 0,
        *,
        early_weights: bool = False,
        n_whole: int = 0,
        modes: tuple[BlockMode, ...] | None = None,
    ) -> Plan:
        """The plan with its predictions."""
        profile, (memory, runtime) = self.profile, self.kinds[early_weights]
        modes = modes or block_modes(len(profile.blocks), n_swap, n_ckpt, n_ckpt_swap)
        activations = memory.activations(modes)
        return Plan(
            n_persist=n_persist,
            n_buffer=n_buffer,
            n_swap=n_swap,
            n_ckpt=n_ckpt,
            chunk_elements=self.layout.chunk_elements,
            large_first=self.layout.large_first,
            n_chunks=len(self.layout.chunks),
            block_modes=modes,
            model=fingerprint(profile),
            tokens=profile.tokens,
            accumulation=profile.accumulation,
            moment_dtype=profile.moment_dtype,
            chunked_loss=profile.chunked_loss,
            device_bytes=memory.device_bytes(n_persist, n_buffer, activations, n_stream),
            host_bytes=memory.host_bytes(n_persist, activations, n_speculate, n_whole),
            n_ckpt_swap=n_ckpt_swap,
            keep_attention=self.keep_attention,
            n_speculate=n_speculate,
            early_weights=early_weights and n_speculate > 0,
            n_whole=n_whole,
            n_stream=n_stream,
            n_device_gradient=memory.device_regions(n_persist),
            n_host_gradient=memory.host_regions(n_persist, activations.swapped_bytes),
            pack_swaps=memory.pack_swaps,
            step_ms=runtime.step_ms(modes, n_persist, n_buffer, n_speculate, n_stream, n_whole),
            transient_bytes=activations.peak_bytes - activations.held_bytes,
        )

    def most_early(self, n_persist: int, swapped_bytes: int, *, early_weights: bool = False) -> int:
        """Early updates that host memory has room for."""
        if not self.runtime.speculates:
            return 0
        return int(self.kinds[early_weights][0].most_early(n_persist, np.array(swapped_bytes)))
