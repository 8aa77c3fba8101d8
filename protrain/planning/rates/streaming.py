"""Streamed updates: the GPU updates some chunks in host memory while the host updates the others (not in the paper).

Their states are streamed through the GPU. Host memory limits both kinds of update, and yet the two together update more
parameters a second than the host does alone. ``protrain.planning.sharing`` chooses the chunks.
"""

from __future__ import annotations

from protrain.hardware.profile import HardwareProfile
from protrain.planning.rates.update_rates import CALIBRATED_DTYPE, moved_bytes, read_bytes, written_bytes

_STAGING_SLOTS = 2  # slots of the engine's AdamStaging: one is copied in while the other is copied out
_STAGING_BYTES = 128 * 1024**2  # makes pieces of a state about 20 MiB, which reach the full rate of a copy engine
_UNREAD = {"bfloat16": 0, "float16": 2, "float32": 0}  # bytes a parameter that are copied in, though never read
_STATE_BYTES = 18  # the most bytes a parameter: a float16 weight and everything else in float32


def may_stream(hardware: HardwareProfile) -> bool:
    """Whether the GPU may update chunks in host memory, which takes a calibrated rate of doing so."""
    return hardware.device_type == "cuda" and hardware.streamed_adam_gparams is not None


def staging_bytes(chunk_elements: int) -> int:
    """Device memory of the staging for streamed states."""
    return min(_STAGING_BYTES, _STAGING_SLOTS * _STATE_BYTES * chunk_elements)


def streamed_rates(hardware: HardwareProfile, dtype: str, moment_bytes: int) -> tuple[float, tuple[float, float]]:
    """1e9 parameters a second that the GPU updates in host memory with nothing beside it, and GB/s to the GPU and back.

    If calibration did not measure it, the rate is what the link allows. With other dtypes than calibration's, the time
    grows with the bytes that are transferred.
    """
    there, back = read_bytes(dtype, moment_bytes) + _UNREAD[dtype], written_bytes(dtype, moment_bytes)
    gbps, calibrated = hardware.bidirectional_gbps, hardware.streamed_adam_gparams
    if calibrated is not None:
        gbps = calibrated * moved_bytes(CALIBRATED_DTYPE)
    gparams = gbps / (there + back)
    return gparams, (gparams * there, gparams * back)
