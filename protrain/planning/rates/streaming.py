"""Host chunks that the device updates, their states streamed through it, while the host updates the others.

Not in the paper. The host's memory is the limit of both, and yet together they do more than the host does alone.
:func:`protrain.planning.layout.streamed_chunks` says which.
"""

from __future__ import annotations

from protrain.hardware.profile import HardwareProfile
from protrain.planning.rates.update_rates import CALIBRATED_DTYPE, moved_bytes, read_bytes, written_bytes

_STAGING_SLOTS = 2  # of AdamStaging: one is copied in while the other is copied out
_STAGING_BYTES = 128 * 1024**2  # pieces of a state are some 20 MiB then, which reach the full rate of a copy engine
_UNREAD = {"bfloat16": 0, "float16": 2, "float32": 0}  # bytes a parameter of the weight: it is copied all the same
_STATE_BYTES = 18  # a parameter at most: a float16 weight and everything else in float32


def staging_bytes(chunk_elements: int) -> int:
    """Device memory that streamed states pass through."""
    return min(_STAGING_BYTES, _STAGING_SLOTS * _STATE_BYTES * chunk_elements)


def streamed_rates(hardware: HardwareProfile, dtype: str, moment_bytes: int) -> tuple[float, tuple[float, float]]:
    """1e9 parameters a second that the device alone updates in host memory, and GB/s to it and back.

    Where calibration does not know, what the link allows. Other dtypes than calibration's move more bytes, or fewer,
    and take as much longer.
    """
    there, back = read_bytes(dtype, moment_bytes) + _UNREAD[dtype], written_bytes(dtype, moment_bytes)
    gbps, calibrated = hardware.bidirectional_gbps, hardware.streamed_adam_gparams
    if calibrated is not None:
        gbps = calibrated * moved_bytes(CALIBRATED_DTYPE)
    gparams = gbps / (there + back)
    return gparams, (gparams * there, gparams * back)
