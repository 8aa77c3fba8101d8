"""Plans drawn at random from all that fit, not only good ones: what is predicted must hold everywhere."""

from __future__ import annotations

import random

import numpy as np

from protrain.hardware import HardwareProfile
from protrain.planning import MemoryModel, Plan, block_modes, evaluate
from protrain.planning.layout import layouts, updated_chunks
from protrain.profiler.model_profile import ModelProfile

_TRIES = 20_000


def draw(
    profile: ModelProfile, hardware: HardwareProfile, count: int, *, seed: int, step_during_backward: bool = False
) -> list[Plan]:
    """``count`` different plans, fewer where fewer fit. The same for the same seed, profile and limits.

    Activations are chosen first, one kind of mode as likely as another, then the placement among what they leave room
    for, so that small models do not yield everything persistent every time.
    """
    generator = random.Random(seed)
    kinds = [profile]
    if any(block.attention_bytes for block in profile.blocks):
        kinds.append(profile.keeping_attention())
    models = [
        [MemoryModel(kind, hardware, layout, update_in_backward=step_during_backward) for kind in kinds]
        for layout in layouts(profile)
    ]
    n_blocks = len(profile.blocks)
    found: dict[tuple[int, ...], Plan] = {}
    for _ in range(_TRIES):
        if len(found) == count:
            break
        n_swap = generator.choice([0, generator.randint(0, n_blocks)])
        n_ckpt = generator.randint(0, n_blocks - n_swap)
        keep_attention = n_ckpt > 0 and generator.randrange(len(kinds)) > 0
        memory = models[generator.randrange(len(models)) if len(models) > 1 else 0][keep_attention]
        layout = memory.layout
        n_chunks = len(layout.chunks)
        n_persist = generator.randint(0, n_chunks)
        least = memory.least_buffers(n_persist)
        n_buffer = generator.randint(least, max(least, memory.all_buffers(n_persist)))
        n_ckpt_swap = generator.choice([0, generator.randint(0, n_ckpt)])
        activations = memory.activations(block_modes(n_blocks, n_swap, n_ckpt, n_ckpt_swap))
        fits = memory.device_bytes(n_persist, n_buffer, activations) <= hardware.device_bytes
        if not fits or memory.host_bytes(n_persist, activations) > hardware.host_bytes:
            continue
        n_speculate, n_whole, early_weights = 0, 0, False
        if not step_during_backward and hardware.device_type == "cuda":
            early_weights = generator.random() < 0.5
            kind = memory.making_weights() if early_weights else memory
            most = int(kind.most_early(n_persist, np.array(activations.swapped_bytes)))
            n_speculate = generator.choice([0, most, generator.randint(0, most)])
            if early_weights and n_speculate:
                whole = min(n_speculate - 1, kind.most_whole(n_persist, n_speculate, activations.swapped_bytes))
                n_whole = generator.choice([0, whole])
        n_stream = 0
        others = sum(chunk >= n_persist + n_speculate for chunk in updated_chunks(profile, layout))
        if hardware.device_type == "cuda" and hardware.streamed_adam_gparams is not None:
            n_stream = generator.choice([0, generator.randint(0, others)])
        if memory.device_bytes(n_persist, n_buffer, activations, n_stream) > hardware.device_bytes:
            continue
        updates = n_speculate, early_weights and n_speculate > 0, n_whole, n_stream
        key = (n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, *updates, keep_attention, layout.large_first)
        if key not in found:
            found[key] = evaluate(
                profile,
                hardware,
                n_persist=n_persist,
                n_buffer=n_buffer,
                n_swap=n_swap,
                n_ckpt=n_ckpt,
                n_ckpt_swap=n_ckpt_swap,
                n_speculate=n_speculate,
                early_weights=early_weights,
                n_whole=n_whole,
                n_stream=n_stream,
                keep_attention=keep_attention,
                large_first=layout.large_first,
                step_during_backward=step_during_backward,
            )
    return list(found.values())
