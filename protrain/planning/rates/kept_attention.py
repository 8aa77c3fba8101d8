"""Attention that is kept while the rest of a block is recomputed: what it could gain at most.

Either all recomputed blocks keep it or none does, so that a profile with larger inputs and a shorter recomputation
(:meth:`~protrain.profiler.model_profile.ModelProfile.keeping_attention`) tells the models of time and memory all that
they need to know.
"""

from __future__ import annotations

from itertools import accumulate

from protrain.hardware.profile import HardwareProfile
from protrain.planning.rates.compute_times import compute_times
from protrain.profiler.model_profile import ModelProfile


def least_ms(profile: ModelProfile, hardware: HardwareProfile, fastest_ms: float) -> float:
    """About the least that a plan with attention kept takes, where the fastest without it takes ``fastest_ms``.

    A plan with it that recomputes n blocks takes at least what these compute, recomputation included. And the same
    without it fits as well and takes longer by no more than the attention of n blocks, while it takes ``fastest_ms`` or
    more. Which n blocks is left open: the least and the most that any n take. That is as good as ``fastest_ms`` is the
    fastest, and a step can grow by more than what is computed, where that disturbs what else runs.
    """
    times, without = compute_times(profile.keeping_attention(), hardware), compute_times(profile, hardware)
    saved = sorted((more - less for more, less in zip(without.recompute, times.recompute, strict=True)), reverse=True)
    computed = accumulate(sorted(times.recompute), initial=times.total)
    shorter = accumulate(saved, initial=0.0)
    return min(max(least, fastest_ms - most) for least, most in zip(computed, shorter, strict=True))
