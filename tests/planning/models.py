"""Models, machines and counts that the planner's tests share.

They start from one H100, kept as it was calibrated. The profile that ships may be replaced by another machine's, with
which the same seeds would be other cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protrain.common.tables import parse_memory
from protrain.hardware.profile import HardwareProfile
from protrain.planning import MemoryModel, Models, pack, predict
from protrain.planning.plan import Counts
from protrain.planning.timeline import Timeline
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord, SegmentRecord, UnitRecord

H100 = HardwareProfile.load(Path(__file__).with_name("h100.json"))
MIB = 1024**2
GIB = 1024**3
N = 1_280_000  # elements of a chunk of `chain`: 2.56 MB of weights
MOVE_MS = 2.56  # one such chunk over the link of MACHINE
UPDATE_MS = 1.0  # one such chunk on its host
DEVICE_UPDATE_MS = 0.01
# Round rates, and nothing that contends.
MACHINE = replace(
    H100,
    contention=(),
    streamed_adam_gparams=None,
    host_adam_gparams=1.28,
    device_adam_gparams=128.0,
    device_copy_gbps=1e6,
    h2d_gbps=1.0,
    d2h_gbps=1.0,
    bidirectional_gbps=2.0,
    host_dram_gbps=1e6,
)
# Two ranks receive and send half of a tensor in half the time of the whole: a chunk of 2.56 MB takes 1 ms.
TWO = replace(MACHINE, world_size=2, all_gather_gbps=1.28, all_to_all_gbps=1.28)
# By name, so that a test may change one: inputs of 256 MiB, 4 GiB in all, beside 8 GiB of states. 20 ms a block give
# the link time for that and not for more.
LONG: dict[str, Any] = {"n_blocks": 16, "elements": 32 * MIB, "saved": 4096 * MIB, "ms": 20.0}
Members = list[tuple[int, int]] | list[int]


def profile_of(
    parameters: Sequence[tuple[int, int]],
    units: Sequence[tuple[int | None, tuple[int, ...]]],
    blocks: tuple[BlockRecord, ...] = (),
    segments: Sequence[tuple[str, int | None, int, int, float]] = (),
) -> ModelProfile:
    """A model whose units are called in their order.

    Args:
        parameters: elements and optimizer group (-1: frozen) of each.
        units: the block and the parameters of each.
        blocks: what is known of the blocks.
        segments: phase, block, live and peak bytes, and milliseconds of each.
    """
    return ModelProfile(
        model="M",
        dtype="bfloat16",
        device="cuda",
        batch_shapes={"ids": (8, 128)},
        tokens=1024,
        buffer_bytes=0,
        parameters=tuple(
            ParameterRecord(name=f"p{at}", shape=(numel,), group=group) for at, (numel, group) in enumerate(parameters)
        ),
        units=tuple(
            UnitRecord(name=f"u{at}", block=block, parameters=members) for at, (block, members) in enumerate(units)
        ),
        calls=tuple(range(len(units))),
        blocks=blocks,
        segments=tuple(
            SegmentRecord(phase=phase, block=block, live_bytes=live, peak_bytes=peak, duration_ms=ms)
            for phase, block, live, peak, ms in segments
        ),
    )


def equal_blocks(n: int, forward_ms: float, backward_ms: float, saved: int, **known: Any) -> tuple[BlockRecord, ...]:
    """``n`` blocks that each save so many bytes."""
    usual: dict[str, Any] = {
        "saved_bytes": saved,
        "saved_tensors": 10,
        "forward_peak_bytes": saved + saved // 8,
        "input_bytes": saved // 16,
        "output_bytes": saved // 16,
        "forward_flops": 10**12,
    }
    times: dict[str, Any] = {"forward_ms": forward_ms, "backward_ms": backward_ms, "recompute_ms": forward_ms}
    return tuple(BlockRecord(name=f"b{at}", **times, **{**usual, **known}) for at in range(n))


def make_profile(
    n_blocks: int = 6, *, elements: int = 8 * MIB, saved: int = 400 * MIB, ms: float = 20.0
) -> ModelProfile:
    """A model of equal blocks between an embedding and a head, as a trace on a GPU would give it."""
    segments: list[tuple[str, int | None, int, int, float]] = []
    for at in range(n_blocks):
        live = at * (saved // 16)
        segments += [("forward", None, live, MIB, 0.5), ("forward", at, live, saved // 4, ms)]
    live = n_blocks * (saved // 16)
    segments += [(phase, None, live, saved // 2, 4.0) for phase in ("forward", "backward")]
    for at in reversed(range(n_blocks)):
        live = (at + 1) * (saved // 16)
        segments += [("backward", at, live, saved + saved // 4, 3 * ms), ("backward", None, live - saved // 16, 0, 0.5)]
    units = [(at - 1 if 0 < at <= n_blocks else None, (at,)) for at in range(n_blocks + 2)]
    return profile_of([(elements, 0)] * (n_blocks + 2), units, equal_blocks(n_blocks, ms, 2 * ms, saved), segments)


def chain(
    forward_ms: float, backward_ms: float, *, n: int = 4, saved: int = 10_000_000, parts: int = 1
) -> ModelProfile:
    """``n`` equal blocks of ``parts`` chunks each and nothing else, which take no memory but what they save."""
    segments: list[tuple[str, int | None, int, int, float]] = [("forward", at, 0, 0, forward_ms) for at in range(n)]
    segments += [("backward", at, 0, 0, backward_ms + forward_ms) for at in reversed(range(n))]
    units = [(at, tuple(range(at * parts, (at + 1) * parts))) for at in range(n)]
    known = {"saved_tensors": 1, "forward_peak_bytes": 0, "input_bytes": 0, "output_bytes": 0, "forward_flops": 10**9}
    return profile_of([(N, 0)] * (n * parts), units, equal_blocks(n, forward_ms, backward_ms, saved, **known), segments)


def of_units(units: Sequence[tuple[int | None, Members]]) -> ModelProfile:
    """Units as (block, parameters); a parameter is (elements, group), or the index of an earlier one that is tied."""
    parameters: list[tuple[int, int]] = []
    known = []
    for block, members in units:
        used = []
        for member in members:
            if isinstance(member, int):
                used.append(member)
            else:
                used.append(len(parameters))
                parameters.append(member)
        known.append((block, tuple(used)))
    return profile_of(parameters, known)


def with_attention(profile: ModelProfile, share: float, part: int) -> ModelProfile:
    """Attention takes ``share`` of every block's recomputation and leaves one of ``part`` parts of what it saves."""
    blocks = tuple(
        replace(block, attention_ms=share * block.recompute_ms, attention_bytes=block.saved_bytes // part)
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks)


def machine(device: int | str, host: int | str, **changes: Any) -> HardwareProfile:
    """An H100 with that much memory."""
    memory: dict[str, Any] = {
        "device_bytes": parse_memory(device, name="device"),
        "host_bytes": parse_memory(host, name="host"),
    }
    return replace(H100, contention=(), **memory, **changes)


def judge_as_calibrated(patch: pytest.MonkeyPatch) -> None:
    """Let searches make plans for the host as it was calibrated, not for a slower one."""
    patch.setattr(predict, "slower_share", lambda hardware: 1.0)


def with_host(hardware: HardwareProfile, share: float) -> HardwareProfile:
    """``hardware`` with a host that updates at ``share`` of its rate."""
    weights, narrow = hardware.host_adam_weight_gparams, hardware.host_adam_narrow_gparams
    return replace(
        hardware,
        host_adam_gparams=hardware.host_adam_gparams * share,
        host_adam_weight_gparams=None if weights is None else weights * share,
        host_adam_narrow_gparams=None if narrow is None else narrow * share,
    )


def placed(n_persist: int, n_buffer: int, n_speculate: int = 0, n_weight_only: int = 0) -> Counts:
    """Counts for a prediction, which takes the blocks' modes apart from them."""
    return Counts(n_persist, n_buffer, n_swap=0, n_ckpt=0, n_speculate=n_speculate, n_weight_only=n_weight_only)


def busy_ms(timeline: Timeline, lane: int) -> float:
    """How long ``lane`` is busy."""
    return sum(operation.end_ms - operation.start_ms for operation in timeline.operations if operation.lane == lane)


def model_of(profile: ModelProfile, hardware: HardwareProfile = MACHINE, **options: Any) -> Models:
    """The predictions for a :func:`chain`. ``options`` are those of its memory model."""
    return Models(MemoryModel(profile, hardware, pack(profile, N, hardware.world_size), **options))
