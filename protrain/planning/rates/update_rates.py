"""The bytes that an update of AdamW reads and writes a parameter, and how many parameters are updated in a second.

Calibration measures updates of bf16 weights with moments in fp32, on the GPU and on the host. On the host it also
measures moments in bf16, as arithmetic may limit those and not memory. If it did not, a factor from one measured host
is used. For all other types, the time is taken to grow with the bytes that are read and written.
"""

from __future__ import annotations

from protrain.hardware.profile import HardwareProfile
from protrain.profiler.model_profile import ModelProfile

CALIBRATED_DTYPE = "bfloat16"
# Bytes a parameter without moments. Read: master (or weight and remainder), and gradient in the weight's type. Written:
# master and weight.
_READ = {"bfloat16": 6, "float16": 6, "float32": 8}
_WRITTEN = {"bfloat16": 4, "float16": 6, "float32": 4}
_WHOLE = 4  # bytes of an element of a moment in fp32
# The host's rate with moments in bf16 over its rate with moments in fp32, as measured on two cores of an AMD EPYC (Zen
# 4). It is used if calibration did not measure this machine's.
_NARROW = 1.2


def read_bytes(dtype: str, moment_bytes: int = _WHOLE) -> int:
    """Bytes read for one weight of ``dtype`` with two moments of ``moment_bytes`` each."""
    return _READ[dtype] + 2 * moment_bytes


def written_bytes(dtype: str, moment_bytes: int = _WHOLE) -> int:
    """Bytes written for one weight of ``dtype`` with two moments of ``moment_bytes`` each."""
    return _WRITTEN[dtype] + 2 * moment_bytes


def moved_bytes(dtype: str, moment_bytes: int = _WHOLE) -> int:
    """Bytes read and written."""
    return read_bytes(dtype, moment_bytes) + written_bytes(dtype, moment_bytes)


def device_update_gparams(profile: ModelProfile, hardware: HardwareProfile) -> float:
    """1e9 parameters a second that the device updates in its own memory."""
    return hardware.device_adam_gparams / _share(profile.dtype, profile.moment_bytes)


def host_update_gparams(profile: ModelProfile, hardware: HardwareProfile) -> float:
    """1e9 parameters a second that the host updates with nothing beside it."""
    dtype, moment_bytes = profile.dtype, profile.moment_bytes
    if moment_bytes == _WHOLE:
        return hardware.host_adam_gparams
    narrow = hardware.host_adam_narrow_gparams or _NARROW * hardware.host_adam_gparams
    return narrow * _share(CALIBRATED_DTYPE, moment_bytes) / _share(dtype, moment_bytes)


def _share(dtype: str, moment_bytes: int) -> float:
    """The bytes that an update moves, as a share of those with moments in fp32."""
    return moved_bytes(dtype, moment_bytes) / moved_bytes(dtype)
