"""How many parameters AdamW updates in a second: the GPU, the host, and the GPU on states in host memory.

Calibration measures updates of bf16 weights with moments in fp32, on the GPU and on the host. On the host it also
measures moments in bf16, as arithmetic may limit those and not memory. If it did not, a factor from one measured host
is used. For all other types, the time is taken to grow with the bytes that are read and written.

[Note: streamed updates] The GPU updates some chunks in host memory while the host updates the others (not in the
paper). Their states are streamed through the GPU. Host memory limits both kinds of update, and yet the two together
update more parameters a second than the host does alone. ``protrain.planning.sharing`` chooses the chunks.

[Note: the slower host] The fastest plan is one whose host finishes just in time. If the host is slower than it was when
it was calibrated, a step under such a plan is longer by nearly all the time that the host is late. A plan that leaves
the host more time recomputes or offloads a little more, and loses a third of that. An example is a 7.24 B model with
batch 8 x 2048 on an H100. Measured where 1,365 ms had been predicted, the plan for the calibrated rate took 1,465 ms,
and a plan for a slower host 1,411 ms. So the search judges plans on a host that is slower than usual. The time that a
plan states is for the rate as calibrated.

Ten machines with an H100 showed how slow hosts are in steps: six reached the predicted rate, one 90% of it, two 85% and
one 79%. Predicted over that distribution, plans for one slower host are as fast as plans for the mean over two rates,
and their search took a fifth less time. Plans for 80% of the rate are predicted to lose up to 3% on a host as
calibrated, plans for 95% up to 8% on one at 85%. The seven cases are in bench/results/h100/NOTES.md.

A host's usual rate lies about halfway between its mean rate in calibration and the rate that it kept four fifths of the
time. That is 99% of the calibrated rate on steady hosts, and was 93% on a host that other tenants slowed down.
"""

from __future__ import annotations

from dataclasses import replace

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


UNKNOWN = 0.97  # usual share of the calibrated rate if calibration did not measure how steady the host is
_SLOWER = 0.89  # share of a host's usual rate that plans are made for


def slower_share(hardware: HardwareProfile) -> float:
    """The share of the host's calibrated rate that plans are made for. 1 on a CPU, where the device is the host."""
    if hardware.device_type == "cpu":
        return 1.0
    slow = hardware.host_adam_p20_gparams
    usual = UNKNOWN if slow is None else (1.0 + min(1.0, slow / hardware.host_adam_gparams)) / 2
    return usual * _SLOWER


def with_host(hardware: HardwareProfile, share: float) -> HardwareProfile:
    """``hardware`` with a host that updates at ``share`` of its rate."""
    weights, narrow = hardware.host_adam_weight_gparams, hardware.host_adam_narrow_gparams
    return replace(
        hardware,
        host_adam_gparams=hardware.host_adam_gparams * share,
        host_adam_weight_gparams=None if weights is None else weights * share,
        host_adam_narrow_gparams=None if narrow is None else narrow * share,
    )


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
