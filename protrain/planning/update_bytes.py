"""What one update of AdamW moves, in bytes a parameter, and how long it takes beside what calibration measured.

Calibration measures bf16 weights with moments in fp32. Updates are limited by what they move, so where that is less
they take as much less.
"""

from __future__ import annotations

from protrain.profiler.model_profile import ModelProfile

CALIBRATED_DTYPE = "bfloat16"
# Without moments: master (or weight and remainder) and gradient, of the weight's type; master and weight.
_READ = {"bfloat16": 6, "float16": 6, "float32": 8}
_WRITTEN = {"bfloat16": 4, "float16": 6, "float32": 4}
_WHOLE = 4  # an element of a moment in fp32


def read_bytes(dtype: str, moment_bytes: int = _WHOLE) -> int:
    """Of weights of ``dtype``, with two moments of ``moment_bytes`` each."""
    return _READ[dtype] + 2 * moment_bytes


def written_bytes(dtype: str, moment_bytes: int = _WHOLE) -> int:
    """Likewise."""
    return _WRITTEN[dtype] + 2 * moment_bytes


def moved_bytes(dtype: str, moment_bytes: int = _WHOLE) -> int:
    """Both."""
    return read_bytes(dtype, moment_bytes) + written_bytes(dtype, moment_bytes)


def update_share(profile: ModelProfile) -> float:
    """Of the time of an update with moments in fp32 that of one with the moments of ``profile``."""
    return moved_bytes(profile.dtype, profile.moment_bytes) / moved_bytes(profile.dtype)
