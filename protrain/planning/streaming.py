"""Host chunks that the device updates, their states streamed through it, while the host updates the others.

Not in the paper. The host's memory is the limit of both, and yet together they do more than the host does alone.

[Note: which chunks are streamed] The next forward needs chunks in order, so both must come along in that order: of
every k chunks the device gets the last, which has to be there when the host is done with the k - 1 before it. Chunks
that are updated early stay with the host, which does that while backward has the link.
"""

from __future__ import annotations

from collections.abc import Sequence

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout
from protrain.profiler.model_profile import ModelProfile

STAGING_SLOTS = 2  # one is copied in while the other is copied out
_STAGING_BYTES = 128 * 1024**2  # pieces of a state are some 20 MiB then, which reach the full rate of a copy engine
_STATE_BYTES = 18  # a parameter at most: a float16 weight and everything else in float32


def updated_chunks(profile: ModelProfile, layout: Layout) -> list[int]:
    """Chunks that a step updates: trainable ones that a unit uses, for no gradient comes otherwise."""
    used = {
        chunk
        for unit in profile.calls
        for member in (unit, *profile.units[unit].within)
        for chunk in layout.unit_chunks[member]
    }
    return [chunk.index for chunk in layout.chunks if chunk.trainable and chunk.index in used]


def streamed_chunks(candidates: Sequence[int], n_stream: int) -> list[int]:
    """``n_stream`` of ``candidates``, evenly. See [Note: which chunks are streamed]."""
    return [candidates[-(-nth * len(candidates) // n_stream) - 1] for nth in range(1, n_stream + 1)]


def staging_bytes(hardware: HardwareProfile, chunk_elements: int) -> int:
    """Device memory that streamed states pass through: none where a kernel reaches into host memory."""
    if not hardware.streamed_adam_copies:
        return 0
    return min(_STAGING_BYTES, STAGING_SLOTS * _STATE_BYTES * chunk_elements)
