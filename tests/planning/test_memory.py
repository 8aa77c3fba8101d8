"""The memory model against steps that really ran: never under, and close."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import protrain
from protrain.common import batch as batches
from protrain.hardware.detection import detect
from protrain.planning import BlockMode, MemoryModel, block_modes, pack
from protrain.planning.layout import summed_on_device
from protrain.planning.memory import state_bytes
from protrain.profiler.memory_meter import StorageMeter
from protrain.profiler.model_profile import ModelProfile
from tests.planning.counts import placed

profile = partial(protrain.profile, device="cpu")
Builder = Callable[..., Any]
NONE, CKPT, SWAP = BlockMode.NONE, BlockMode.CKPT, BlockMode.SWAP


def _model(traced: ModelProfile) -> MemoryModel:
    hardware = detect("cpu", device_memory="1GiB", host_memory="1GiB")
    return MemoryModel(traced, hardware, pack(traced))


def _true_peak(model: nn.Module, batch: dict[str, Tensor], checkpointed: set[str]) -> int:
    """Storage bytes at the peak of plain steps, weights aside, with gradients freed as they arrive.

    With what the model returned held until it returns the next.
    """
    model.train()
    with ExitStack() as stack:
        for name in checkpointed:
            module = model.get_submodule(name)
            forward = module.forward
            stack.callback(module.__dict__.pop, "forward")
            module.forward = lambda *a, _f=forward, **k: checkpoint(_f, *a, use_reentrant=False, **k)
        for parameter in model.parameters():
            handle = parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            stack.callback(handle.remove)
        meter = StorageMeter()
        meter.ignore((*model.parameters(), *model.buffers()))
        meter.count(batch.values())
        with meter:
            for _ in range(2):
                output = model(**batches.training_arguments(model, batch))
                batches.loss_of(output).backward()
    return meter.peak_bytes


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "t5"])
@pytest.mark.parametrize("n_ckpt", [0, 1, 99])
def test_predicted_peak_is_close_to_the_true_one(
    tiny_model: Builder, tiny_batch: Builder, family: str, n_ckpt: int
) -> None:
    model, batch = tiny_model(family), tiny_batch(batch=4, sequence=64)
    traced = profile(model, batch)
    n_blocks = len(traced.blocks)
    modes = block_modes(n_blocks, 0, min(n_ckpt, n_blocks))
    predicted = _model(traced).activations(modes)
    names = {block.name for block, mode in zip(traced.blocks, modes, strict=True) if mode is CKPT}
    true = _true_peak(model, batch, names)
    assert true <= predicted.peak_bytes <= 1.15 * true
    assert predicted.held_bytes <= predicted.peak_bytes


def test_each_mode_costs_what_it_keeps(tiny_model: Builder, tiny_batch: Builder) -> None:
    traced = profile(tiny_model("llama"), tiny_batch(batch=4, sequence=64))
    memory, saved = _model(traced), traced.blocks[0].saved_bytes
    peak = {modes: memory.activations(modes).peak_bytes for modes in ((CKPT,) * 3, (NONE,) * 3, (SWAP,) * 3)}
    all_ckpt, all_none, all_swap = peak.values()
    assert all_none > all_ckpt + saved  # two blocks beside the one whose backward runs; the head's peak hides part
    assert all_ckpt < all_swap < all_none + saved
    assert memory.activations((SWAP, CKPT, CKPT)).peak_bytes <= all_ckpt + saved
    assert memory.activations((SWAP,) * 3).swapped_bytes >= 3 * saved
    assert memory.activations((CKPT,) * 3).swapped_bytes == 0


def test_what_a_block_offloads_is_there_until_the_next_unit_is_done() -> None:
    """Another block right behind it, or a layer between the two that saves nothing to speak of."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layers(x)

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    class Model(nn.Module):
        def __init__(self, between: type[nn.Module]) -> None:
            super().__init__()
            self.layers, self.between = nn.ModuleList(Block() for _ in range(3)), between()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = self.between(layer(x))
            return x

    def most_in_forward(between: type[nn.Module]) -> tuple[int, int]:
        """For the first block, up to the end of the second, which is swapped too; and what a block saves."""
        traced = profile(Model(between), (torch.randn(256, 64),))
        assert len(traced.blocks) == 3
        upto = next(at for at, segment in enumerate(traced.segments) if segment.block == 1) + 1
        traced = replace(traced, segments=traced.segments[:upto])
        peak = {mode: _model(traced).activations((mode, SWAP, CKPT)).peak_bytes for mode in (SWAP, CKPT)}
        return peak[SWAP] - peak[CKPT], traced.blocks[0].saved_bytes

    more, saved = most_in_forward(nn.Identity)
    assert more == saved
    more, saved = most_in_forward(Between)
    assert more < saved / 4


@pytest.mark.parametrize(
    ("dtype", "trainable", "frozen"), [("bfloat16", 14, 2), ("float16", 16, 2), ("float32", 16, 4)]
)
def test_states_per_parameter(
    tiny_model: Builder, tiny_batch: Builder, dtype: str, trainable: int, frozen: int
) -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    traced = profile(model, tiny_batch(), dtype=getattr(torch, dtype))
    layout = pack(traced)
    assert {chunk.trainable for chunk in layout.chunks} == {True, False}
    for chunk in layout.chunks:
        assert state_bytes(chunk, traced) == chunk.elements * (trainable if chunk.trainable else frozen)
        narrow = replace(traced, moment_dtype="bfloat16")
        assert state_bytes(chunk, narrow) == chunk.elements * (trainable - 4 if chunk.trainable else frozen)


def test_static_memory_moves_between_device_and_host(tiny_model: Builder, tiny_batch: Builder) -> None:
    traced = profile(tiny_model("llama"), tiny_batch())
    memory = _model(traced)
    layout = memory.layout
    n_chunks = len(layout.chunks)
    activations = memory.activations((CKPT,) * 3)
    total = sum(state_bytes(chunk, traced) for chunk in layout.chunks)
    for n_persist in range(n_chunks + 1):
        parts = memory.static_parts(n_persist, 0)
        assert parts["persistent chunks"] == sum(state_bytes(chunk, traced) for chunk in layout.chunks[:n_persist])
        host = memory.host_bytes(placed(n_persist, 1), activations) - memory.host_bytes(
            placed(n_chunks, 0), activations
        )
        assert host == total - parts["persistent chunks"]
    several = _model(replace(traced, accumulation=2))
    for n_persist in range(n_chunks):
        # A sum of 4 bytes takes the place of the gradient of fp32. It passes through three buffers.
        for n_sum in range(n_chunks - n_persist + 1):
            counts = placed(n_persist, 1)._replace(n_device_sum=n_sum)
            of_sum = summed_on_device(n_chunks, n_persist, n_sum)
            in_host = [chunk for chunk in layout.chunks[n_persist:] if chunk.index not in of_sum]
            summed = [layout.chunks[chunk] for chunk in of_sum]
            assert several.host_bytes(counts, activations) == memory.host_bytes(placed(n_persist, 1), activations)
            assert several.host_sum_bytes(n_persist, n_sum) == 4 * sum(chunk.elements for chunk in in_host)
            more = several.static_bytes(n_persist, 1, n_sum) - memory.static_bytes(n_persist, 1)
            buffer = max((chunk.elements for chunk in in_host), default=0)
            assert more == 4 * sum(chunk.elements for chunk in summed) + 3 * 4 * buffer
    # All on the device: no staging, only the partial sums of the norm.
    assert memory.static_parts(n_chunks, 0)["gradient staging"] == memory.partial_bytes
    assert memory.static_bytes(0, 3) - memory.static_bytes(0, 2) == layout.chunk_elements * 4


@pytest.mark.parametrize(("dtype", "spare"), [("bfloat16", 12), ("float16", 14), ("float32", 12)])
def test_as_many_second_copies_as_host_memory_has_room_for(
    tiny_model: Builder, tiny_batch: Builder, dtype: str, spare: int
) -> None:
    model = tiny_model("llama")
    model.model.layers[1].requires_grad_(False)
    traced = profile(model, tiny_batch(), dtype=getattr(torch, dtype))
    layout = pack(traced)
    kinds = [chunk.trainable for chunk in layout.chunks]
    assert False in kinds[1:-1]
    roomy = detect("cpu", device_memory="1GiB", host_memory="1GiB")
    for n_persist in range(len(kinds) + 1):
        for swapped in (0, 5000):
            least = MemoryModel(traced, roomy, layout).least_host_bytes(n_persist, swapped)
            for n_speculate in range(len(kinds) - n_persist + 1):
                chunks = layout.chunks[n_persist : n_persist + n_speculate]
                size = sum(chunk.elements * spare for chunk in chunks if chunk.trainable)

                def most(host_bytes: int, n_persist: int = n_persist, swapped: int = swapped) -> int:
                    memory = MemoryModel(traced, replace(roomy, host_bytes=host_bytes), layout)
                    return memory.speculation(n_persist, len(kinds), swapped, whole=True)[0]

                assert most(least + size) >= n_speculate
                if n_speculate and chunks[-1].trainable:
                    assert most(least + size - 1) < n_speculate
            assert most(least - 10**9) == 0, "negative room"


def test_enclosing_units_hold_their_chunks_too() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(300))
            self.layers = nn.ModuleList([Inner() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x * self.scale.sum()

    traced = profile(Outer(), (torch.randn(2, 16),))
    memory = MemoryModel(traced, detect("cpu"), pack(traced, 384))
    # The model's own scale lies in the first chunk and stays held while each layer holds another.
    assert memory.least_buffers(0) == 2
    assert memory.least_buffers(1) == 1
    assert memory.least_buffers(len(memory.layout.chunks)) == 0
