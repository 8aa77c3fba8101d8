"""How fast a machine does its part of a step when nothing runs beside it: computing, copies of activations, updates.

Computing takes the milliseconds that the trace measured, per block and between blocks, or an estimate of them.

[Note: packed copies] A swapped block's saved activations are copied storage by storage, or packed into one buffer.
Copied directly, each distinct storage is one copy out and one copy back, and the GPU computes nothing for it. Packed,
one kernel writes all storages into one buffer, and the buffer is one copy each way. In backward the tensors are views
of that buffer.

Packing costs a pass over the GPU's memory. It saves the start of every copy but one each way. The GPU's computing for a
block, packing included, runs beside the copies of the block next to it. Copies out have until the end of the next
forward, when the memory is given up. Copies back begin with the backward of the block before in backward order. So in a
row of swapped blocks each block takes as long as its computing or its copies, whichever is longer. Packing is faster
for blocks of many small tensors. For blocks of few large tensors direct copies are as fast, and where computing hides
the copies they are faster.

[Note: update rates] AdamW runs on the GPU, on the host, and on the GPU for states in host memory. Calibration measures
updates of bf16 weights with moments in fp32, on the GPU and on the host. On the host it also measures moments in bf16,
as arithmetic may limit those and not memory. If it did not, a factor from one measured host is used. For all other
types, the time is taken to grow with the bytes that are read and written.

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
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord

# Factors for estimates. They were fitted on an H100 to blocks of LLaMA-7B and 13B, GPT-2 10B and 15B, OPT-13B and
# Mistral-7B, most of them eager; estimates of these blocks are 2% too short to 11% too long. The factor for attention
# was fitted to sequences of 32k and 64k tokens.
_PRODUCTS = 0.86  # on the time of products by the matmul ceiling: they run faster than the calibrated product
_ATTENTION = 1.36  # on the time of attention's products by that ceiling, with half of them under a causal mask
_TRAFFIC = 1.37  # on the time of all other bytes by the copy ceiling
_BACKWARD = 1.1  # on the forward's time, for each of the two kinds of gradient
_HEAD = 1.6  # on the time of the head's products by the matmul ceiling, with the loss; these models have 1.45 to 1.9
_ODD_HEAD = 6.0  # in place of _HEAD if a row of logits is no multiple of 16 bytes, as GPT-2's 50,257 are
_CHUNKED_HEAD = 1.06  # in place of both if the loss is computed in pieces; an H200 has 1.04 to 1.07
_RECOMPUTED = 0.85  # on the forward's time: recomputation stops at the last saved tensor, unless the graph is compiled


@dataclass(frozen=True, kw_only=True)
class ComputeTimes:
    """Milliseconds of computing in one step."""

    forward: tuple[float, ...]  # per block
    backward: tuple[float, ...]  # per block, without recomputation
    recompute: tuple[float, ...]  # per block
    gap_forward: tuple[float, ...]  # of what runs before every block, and after the last
    gap_backward: tuple[float, ...]  # by the same places in forward order


def compute_times(profile: ModelProfile, hardware: HardwareProfile) -> ComputeTimes:
    """The times that the trace measured if it ran on this type of device, else estimates from operations and bytes."""
    if profile.device == hardware.device_type:
        return _measured(profile)
    return _estimated(profile, hardware)


def _measured(profile: ModelProfile) -> ComputeTimes:
    gaps = {phase: [0.0] * (len(profile.blocks) + 1) for phase in ("forward", "backward")}
    for phase, gap_ms in gaps.items():
        # A gap's place is that of the block that follows it in forward. In backward that block runs before the gap.
        segments = [segment for segment in profile.segments if segment.phase == phase]
        place = len(profile.blocks)
        for segment in reversed(segments) if phase == "forward" else segments:
            if segment.block is None:
                gap_ms[place] += segment.duration_ms
            else:
                place = segment.block
    return ComputeTimes(
        forward=tuple(block.forward_ms for block in profile.blocks),
        backward=tuple(block.backward_ms for block in profile.blocks),
        recompute=tuple(block.recompute_ms for block in profile.blocks),
        gap_forward=tuple(gaps["forward"]),
        gap_backward=tuple(gaps["backward"]),
    )


def _estimated(profile: ModelProfile, hardware: HardwareProfile) -> ComputeTimes:
    flops_per_ms = hardware.matmul_tflops * 1e9
    share = profile.n_trainable / max(1, profile.n_parameters)  # a frozen weight has no gradient to compute

    def estimated(block: BlockRecord, *, attention: bool = True) -> float:
        flops = _PRODUCTS * (block.forward_flops - block.attention_flops)
        flops += _ATTENTION * block.attention_flops * attention
        return flops / flops_per_ms + _TRAFFIC * bytes_ms(block.forward_traffic_bytes, hardware.device_copy_gbps)

    forward = tuple(estimated(block) for block in profile.blocks)
    recomputed = 1.0 if profile.compiled else _RECOMPUTED
    recompute = tuple(recomputed * estimated(block, attention=block.recomputes_attention) for block in profile.blocks)
    heads = sum(
        record.numel * (_CHUNKED_HEAD if profile.chunked_loss else _ODD_HEAD if record.shape[0] % 8 else _HEAD)
        for record in _heads(profile)
    )
    head = 2 * profile.tokens * heads / flops_per_ms
    return ComputeTimes(
        forward=forward,
        backward=tuple(time * _BACKWARD * (1 + share) for time in forward),
        recompute=recompute,
        gap_forward=(*([0.0] * len(forward)), head * (1 + (1 + share) * profile.chunked_loss)),
        gap_backward=(*([0.0] * len(forward)), head * (1 + share) * (not profile.chunked_loss)),
    )


def _heads(profile: ModelProfile) -> list[ParameterRecord]:
    """The matrices outside blocks by which every token is multiplied.

    The first matrix outside blocks is the embedding, in which tokens are looked up. A head has as many rows as the
    embedding. If no other matrix has, and the embedding is the largest, the head is tied to the embedding, and the
    other matrices are tables of positions.
    """
    outside = {index for unit in profile.units if unit.block is None for index in unit.parameters}
    matrices = [profile.parameters[index] for index in sorted(outside) if len(profile.parameters[index].shape) > 1]
    if not matrices or not profile.blocks:
        return []
    embedding, *others = matrices
    heads = [record for record in others if record.shape[0] == embedding.shape[0]]
    if heads:
        return heads
    return [embedding] if embedding.numel >= max((record.numel for record in others), default=0) else others


def bytes_ms(size_bytes: float, gbps: float) -> float:
    """Milliseconds that ``size_bytes`` take at ``gbps`` GB/s."""
    return size_bytes / gbps / 1e6


def computing_by_visit(profile: ModelProfile, times: ComputeTimes) -> tuple[list[float], list[float]]:
    """Milliseconds per visit, of forward and of backward, both in forward order, without recomputation.

    The time of a block is divided evenly among its calls. What runs between blocks counts for the block that follows
    it, and after the last block for the last unit, which is usually the head.
    """
    blocks = [profile.units[unit].block for unit in profile.calls]
    n_calls = Counter(blocks)
    forward = [0.0 if block is None else times.forward[block] / n_calls[block] for block in blocks]
    backward = [0.0 if block is None else times.backward[block] / n_calls[block] for block in blocks]
    for gap, (forward_ms, backward_ms) in enumerate(zip(times.gap_forward, times.gap_backward, strict=True)):
        visit = blocks.index(gap) if gap in n_calls else len(blocks) - 1
        forward[visit] += forward_ms
        backward[visit] += backward_ms
    return forward, backward


# The rate of flattening over that of copies on the device. Ten calibrations of H100s and H200s found 0.79 to 0.92.
_FLATTENING = 0.86


class GradientPart(NamedTuple):
    """What a visit of backward adds to the gradient of a chunk."""

    number: int  # parts are counted in the order in which they arrive
    chunk: int
    flatten_ms: float
    offload_ms: float


def gradients_by_visit(profile: ModelProfile, hardware: HardwareProfile, layout: Layout) -> list[list[GradientPart]]:
    """The parts of gradients that each visit of backward yields.

    A parameter's gradient is complete when backward leaves the unit that used the parameter first. Several ranks reduce
    the gradient of a whole chunk, and then a rank offloads its shard, once for all gradients of the chunk.
    """
    left: dict[int, int] = {}  # by parameter: its last visit in backward
    for at, unit in enumerate(reversed(profile.calls)):
        for parameter in profile.units[unit].parameters:
            left[parameter] = at
    elements = Counter[tuple[int, int]]()  # by visit and chunk
    for slot in layout.slots:
        if profile.parameters[slot.parameter].group >= 0 and slot.parameter in left:
            elements[left[slot.parameter], slot.chunk] += slot.numel
    flatten_gbps = _FLATTENING * hardware.device_copy_gbps
    of_visit: list[list[GradientPart]] = [[] for _ in profile.calls]
    for index, ((at, chunk), count) in enumerate(sorted(elements.items())):
        size = offloaded = count * profile.element_bytes
        if layout.world_size > 1:
            offloaded = layout.shard_elements(layout.chunks[chunk]) * profile.element_bytes
        flatten_ms, offload_ms = bytes_ms(2 * size, flatten_gbps), bytes_ms(offloaded, hardware.d2h_gbps)
        of_visit[at].append(GradientPart(index, chunk, flatten_ms, offload_ms))
    return of_visit


# The time of a copy beyond the time of its bytes, 12 us. It comes from the rows "activations to the host and back" of
# bench/results/h100/kernels-another-machine.json. There 961 MiB in 23 tensors, copied one by one out and back, take
# 37.0 ms, and 1234 MiB in 31 tensors 47.5 ms. 901 MiB in one copy each way take 34.1 ms without packing and unpacking.
COPY_MS = 0.012
# The share of the time that packing must save, since a packed block takes more device memory: its buffer stays
# throughout its backward.
_LEAST_GAIN = 0.02


class ModeCosts(NamedTuple):
    """Milliseconds that the mode of a block costs one of its calls: copies on the link, and computing on the GPU."""

    out_ms: float = 0.0  # on the link, after forward
    back_ms: float = 0.0  # on the link, before backward
    pack_ms: float = 0.0  # on the GPU, at the end of forward
    recompute_ms: float = 0.0  # on the GPU, in backward


def swap_costs(block: BlockRecord, n_calls: int, hardware: HardwareProfile, *, packed: bool) -> ModeCosts:
    """The copies if everything is packed into one buffer, or if each storage is copied by itself.

    ``n_calls`` are the block's calls in one forward.
    """
    size_bytes = block.saved_bytes / n_calls
    if not packed:
        return ModeCosts(*_link_ms(size_bytes, block.saved_tensors / n_calls, hardware))
    gbps = _FLATTENING * hardware.device_copy_gbps  # packing is flattening of whole storages
    return ModeCosts(*_link_ms(size_bytes, 1, hardware), pack_ms=bytes_ms(2 * size_bytes, gbps))  # read and written


def choose_packed(profile: ModelProfile, hardware: HardwareProfile) -> tuple[bool, ...]:
    """By block, whether a row of such blocks takes clearly less time with packing. Empty if no block is packed.

    On a CPU device memory is host memory, and packing would only be one more copy.
    """
    if hardware.device_type == "cpu":
        return ()
    times = compute_times(profile, hardware)
    n_calls = Counter(profile.units[unit].block for unit in profile.calls)

    def row_ms(index: int, *, packed: bool) -> float:
        calls = max(1, n_calls[index])
        costs = swap_costs(profile.blocks[index], calls, hardware, packed=packed)
        forward_ms, backward_ms = times.forward[index] / calls, times.backward[index] / calls
        return max(costs.out_ms, forward_ms + costs.pack_ms) + max(costs.back_ms, backward_ms)

    packs = tuple(
        row_ms(index, packed=True) < (1 - _LEAST_GAIN) * row_ms(index, packed=False)
        for index in range(len(profile.blocks))
    )
    return packs if any(packs) else ()


def _link_ms(size_bytes: float, n_copies: float, hardware: HardwareProfile) -> tuple[float, float]:
    """Milliseconds out and back; none for no bytes."""
    if not size_bytes:
        return 0.0, 0.0
    start_ms = n_copies * COPY_MS if hardware.device_type == "cuda" else 0.0
    return bytes_ms(size_bytes, hardware.d2h_gbps) + start_ms, bytes_ms(size_bytes, hardware.h2d_gbps) + start_ms


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


_SLOWER = 0.87  # share of the host's calibrated rate that plans are made for


def slower_share(hardware: HardwareProfile) -> float:
    """The share of the host's calibrated rate that plans are made for. 1 on a CPU, where the device is the host."""
    return 1.0 if hardware.device_type == "cpu" else _SLOWER


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
