"""Plans drawn at random from all that fit, not only good ones, as predictions must hold for every plan."""

from __future__ import annotations

import random

from protrain.hardware.profile import HardwareProfile
from protrain.planning import MemoryModel, Models, Plan
from protrain.planning.layout import pack
from protrain.planning.plan import Counts
from protrain.profiler.model_profile import ModelProfile

_TRIES = 20_000


def draw(profile: ModelProfile, hardware: HardwareProfile, count: int, *, seed: int) -> list[Plan]:
    """``count`` different plans, or all if fewer fit. The same seed, profile and limits give the same plans.

    Activations are chosen first, one kind of mode as likely as another, then the placement among what they leave room
    for, so that small models do not yield everything persistent every time.
    """
    generator = random.Random(seed)
    attends = any(block.attention_bytes for block in profile.blocks)
    layout = pack(profile, world_size=hardware.world_size)
    kinds = [
        Models(MemoryModel(profile.keeping_attention() if keep else profile, hardware, layout))
        for keep in ((False, True) if attends else (False,))
    ]
    n_blocks = len(profile.blocks)
    found: dict[tuple[int, ...], Plan] = {}
    for _ in range(_TRIES):
        if len(found) == count:
            break
        n_swap = generator.choice([0, generator.randint(0, n_blocks)])
        n_ckpt = generator.randint(0, n_blocks - n_swap)
        models = generator.choice(kinds) if n_ckpt else kinds[0]
        memory = models.memory
        n_persist = generator.randint(0, models.n_chunks)
        least = memory.least_buffers[n_persist]
        n_buffer = generator.randint(least, max(least, memory.all_buffers[n_persist]))
        n_ckpt_swap = generator.choice([0, generator.randint(0, n_ckpt)])
        counts = Counts(n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap)
        if memory.accumulates:
            most = models.n_chunks - n_persist
            counts = counts._replace(n_device_sum=generator.choice([0, most, generator.randint(0, most)]))
        if models.steps.speculates:
            swapped_bytes = memory.activations(models.modes(counts)).swapped_bytes
            wanted = generator.choice([0, models.n_chunks, generator.randint(0, models.n_chunks)])
            n_speculate, least = memory.speculation(n_persist, wanted, swapped_bytes, counts.n_device_sum)
            n_weight_only = generator.choice([least, generator.randint(least, n_speculate)])
            counts = counts._replace(n_speculate=n_speculate, n_weight_only=n_weight_only)
        modes = models.modes(counts)
        on_device = models.memory.device_bytes(counts, modes) <= hardware.device_bytes
        if on_device and models.memory.host_bytes(counts, modes) <= hardware.host_bytes:
            key = (*counts, models.keep_attention)
            found.setdefault(key, models.plan(counts))
    return list(found.values())
