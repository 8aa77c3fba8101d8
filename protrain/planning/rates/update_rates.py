"""What one update of AdamW moves, in bytes a parameter, and how many the device and the host do in a second.

Calibration measures bf16 weights with moments in fp32, and on the host also with moments in bf16, as arithmetic may be
what limits those and not memory; where it did not, they are as fast as on the one host where they were measured. All
else takes as much more or less as it moves more or less.
"""

from __future__ import annotations

from protrain.hardware.profile import HardwareProfile
from protrain.profiler.model_profile import ModelProfile

CALIBRATED_DTYPE = "bfloat16"
# Without moments: master (or weight and remainder) and gradient, of the weight's type; master and weight.
_READ = {"bfloat16": 6, "float16": 6, "float32": 8}
_WRITTEN = {"bfloat16": 4, "float16": 6, "float32": 4}
_WHOLE = 4  # bytes of an element of a moment in fp32
# Of the host's rate with moments in fp32, where calibration did not measure it: two cores of an AMD EPYC (Zen 4).
_NARROW = 1.2


def read_bytes(dtype: str, moment_bytes: int = _WHOLE) -> int:
    """Of weights of ``dtype``, with two moments of ``moment_bytes`` each."""
    return _READ[dtype] + 2 * moment_bytes


def written_bytes(dtype: str, moment_bytes: int = _WHOLE) -> int:
    """Likewise."""
    return _WRITTEN[dtype] + 2 * moment_bytes


def moved_bytes(dtype: str, moment_bytes: int = _WHOLE) -> int:
    """Both."""
    return read_bytes(dtype, moment_bytes) + written_bytes(dtype, moment_bytes)


def device_update_gparams(profile: ModelProfile, hardware: HardwareProfile) -> float:
    """1e9 parameters a second that the device updates in its memory."""
    return hardware.device_adam_gparams / _share(profile.dtype, profile.moment_bytes)


def host_update_gparams(profile: ModelProfile, hardware: HardwareProfile) -> float:
    """1e9 parameters a second that the host updates with nothing beside it."""
    dtype, moment_bytes = profile.dtype, profile.moment_bytes
    if moment_bytes == _WHOLE:
        return hardware.host_adam_gparams
    narrow = hardware.host_adam_narrow_gparams or _NARROW * hardware.host_adam_gparams
    return narrow * _share(CALIBRATED_DTYPE, moment_bytes) / _share(dtype, moment_bytes)


def _share(dtype: str, moment_bytes: int) -> float:
    """Of the bytes that an update with moments in fp32 moves."""
    return moved_bytes(dtype, moment_bytes) / moved_bytes(dtype)
