"""The memory model: what a plan takes on the device and in host memory, against steps that really ran and by hand."""

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
from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, MemoryModel, block_modes, pack
from protrain.planning.layout import summed_on_device
from protrain.planning.memory import state_bytes
from protrain.planning.plan import Counts
from protrain.profiler.memory_meter import StorageMeter
from protrain.profiler.model_profile import ModelProfile
from tests.engine import residual
from tests.planning.machines import H100
from tests.planning.models import MACHINE, MIB, N, chain, make_profile, placed

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


@pytest.mark.parametrize(
    ("dtype", "trainable", "frozen"), [("bfloat16", 12, 2), ("float16", 14, 2), ("float32", 12, 4)]
)
def test_states_per_parameter_without_the_gradient(
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
    modes = (CKPT,) * 3
    several = _model(replace(traced, accumulation=2))
    for n_persist in range(n_chunks):
        # A sum of 4 bytes takes the place of the gradient of fp32. It passes through three buffers.
        for n_sum in range(n_chunks - n_persist + 1):
            counts = placed(n_persist, 1)._replace(n_device_sum=n_sum)
            of_sum = summed_on_device(n_chunks, n_persist, n_sum)
            in_host = [chunk for chunk in layout.chunks[n_persist:] if chunk.index not in of_sum]
            summed = [layout.chunks[chunk] for chunk in of_sum]
            assert several.host_bytes(counts, modes) == memory.host_bytes(placed(n_persist, 1), modes)
            assert several.host_sum_bytes(n_persist, n_sum) == 4 * sum(chunk.elements for chunk in in_host)
            more = several.static_bytes(n_persist, 1, n_sum) - memory.static_bytes(n_persist, 1)
            buffer = max((chunk.elements for chunk in in_host), default=0)
            assert more == 4 * sum(chunk.elements for chunk in summed) + 3 * 4 * buffer
    # All on the device: no staging, only the partial sums of the norm.
    assert memory.static_parts(n_chunks, 0)["gradient staging"] == memory.partial_bytes
    assert memory.static_bytes(0, 3) - memory.static_bytes(0, 2) == layout.chunk_elements * 4


ROWS, WIDTH, DEPTH = 256, 32, 8
INPUT_BYTES = ROWS * WIDTH * 4
CHUNK = 8 * MIB  # elements of a chunk of make_profile


@pytest.fixture(scope="module")
def traced() -> ModelProfile:
    return protrain.profile(residual.make(WIDTH, DEPTH), (torch.randn(ROWS, 8),), device="cpu")


def test_inputs_leave_the_device_for_the_host(traced: ModelProfile) -> None:
    memory = _model(traced)
    assert {block.input_bytes for block in traced.blocks} == {INPUT_BYTES}
    kept, moved = memory.activations((CKPT,) * DEPTH), memory.activations((BlockMode.CKPT_SWAP,) * DEPTH)
    # In its own backward a block's input is there, and that of the one before is on its way.
    assert kept.peak_bytes - moved.peak_bytes == (DEPTH - 2) * INPUT_BYTES
    assert kept.held_bytes - moved.held_bytes == (DEPTH - 2) * INPUT_BYTES
    assert kept.swapped_bytes == 0
    assert DEPTH * INPUT_BYTES <= moved.swapped_bytes <= DEPTH * (INPUT_BYTES + 16384)


def memory_of(world_size: int, profile: ModelProfile, hardware: HardwareProfile = H100, **options: Any) -> MemoryModel:
    machine = replace(hardware, world_size=world_size)
    return MemoryModel(profile, machine, pack(profile, CHUNK, world_size), **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_rank_has_its_part_of_the_states(world_size: int, accumulation: int) -> None:
    profile = replace(make_profile(4), accumulation=accumulation)
    memory = memory_of(world_size, profile, replace(H100, streamed_adam_gparams=None))
    layout, modes = memory.layout, block_modes(4, 0, 4)
    per_element = 16 if accumulation > 1 else 14
    everything = per_element * sum(chunk.elements for chunk in layout.chunks)
    for n_persist in range(7):
        away = layout.chunks[n_persist:]
        on_device = memory.static_parts(n_persist, 1)["persistent chunks"]
        in_host = per_element * sum(chunk.elements for chunk in away) // world_size
        assert on_device + in_host == everything // world_size
        if accumulation == 1:
            counts = Counts(n_persist, 1, 0, 4)
            least = memory.host_bytes(Counts(6, 1, 0, 4), modes)
            assert memory.host_bytes(counts, modes) - least == in_host
            copies = memory.copy_bytes(n_persist, len(away), 1 if away else 0)
            shards = [chunk.elements // world_size for chunk in away]
            assert copies == 12 * sum(shards[1:]) + 2 * sum(shards[:1])


def test_the_parts_of_device_memory_by_hand() -> None:
    profile = make_profile(4)  # six chunks of 8 Mi elements
    one, two, three = (memory_of(world_size, profile).static_parts(2, 4) for world_size in (1, 2, 3))
    assert one == {
        "persistent chunks": 2 * CHUNK * 14,
        "chunk buffers": 4 * CHUNK * 2,
        "gradient staging": 2 * CHUNK * 2 + 4 * 6 * 512,
        "buffers and quantised weights": 0,
        "staging for streamed updates": 128 * MIB,
    }
    assert two == {
        "persistent chunks": 2 * CHUNK * 14 // 2,
        "chunk buffers": 4 * CHUNK * 2,
        "gradient staging": 3 * CHUNK * 2 + 2 * CHUNK // 2 * 2 + 2 * 4 * 6 * 512,
        "buffers and quantised weights": 0,
        "staging for streamed updates": 128 * MIB,
        "NCCL and its contexts": (1016 + 2 * 384) * MIB,
    }
    padded = 21846 * 384  # elements; a third of it is no whole number of tiles, so two tiles of every chunk are cut
    assert padded - 384 < CHUNK < padded
    assert three == {
        "persistent chunks": 2 * padded * 14 // 3,
        "chunk buffers": 4 * padded * 2,
        "gradient staging": 3 * padded * 2 + 2 * (padded // 3) * 2 + 2 * (4 * 6 * 512 + 2 * 16384 * 2 * 6),
        "buffers and quantised weights": 0,
        "staging for streamed updates": 2 * 18 * (padded // 3),
        "NCCL and its contexts": (1016 + 3 * 384) * MIB,
    }
    on_cpu = memory_of(2, profile, replace(H100, device_type="cpu")).static_parts(2, 4)
    assert "NCCL and its contexts" not in on_cpu


ROOMY = replace(MACHINE, host_bytes=10**12)
# Bytes a parameter of a whole second copy, and of one of the weight alone.
SIZES = [("bfloat16", 12, 2), ("float16", 14, 2), ("float32", 12, 4)]


@pytest.mark.parametrize(("dtype", "whole", "weight"), SIZES)
def test_as_few_are_weight_only_as_host_memory_allows(dtype: str, whole: int, weight: int) -> None:
    profile = replace(chain(3.0, 6.0, n=8), dtype=dtype)
    memory = MemoryModel(profile, ROOMY, pack(profile, N))
    for n_weight_only in range(6):
        room = N * ((5 - n_weight_only) * whole + n_weight_only * weight)
        assert memory.copy_bytes(2, 5, n_weight_only) == room
        more = memory.host_bytes(placed(2, 2, 5, n_weight_only), (NONE,) * 8)
        assert more - memory.host_bytes(placed(2, 2), (NONE,) * 8) == room
        memory.hardware = replace(ROOMY, host_bytes=memory.least_host_bytes(2, 4000) + room)
        assert memory.speculation(2, 5, 4000) == (5, n_weight_only)
        memory.hardware = replace(ROOMY, host_bytes=memory.hardware.host_bytes - 1)
        assert memory.speculation(2, 5, 4000) == ((5, n_weight_only + 1) if n_weight_only < 5 else (4, 4))
