"""Which chunks in host memory the GPU updates in a simulated step, as the engine would choose them."""

from __future__ import annotations

from math import inf

from protrain.planning.runtime.step import Step
from protrain.planning.runtime.update_queue import Updates
from protrain.planning.sharing import Waiting, first_late


def updated_by_gpu(step: Step, updates: Updates, host_free_ms: float) -> tuple[int, ...]:
    """The chunks that the GPU updates of those in ``updates``, in its order, as the engine chooses them.

    Times count from the norm, which the host knows at ``host_free_ms`` or at 0, whichever is later.
    """
    host_free_ms, gpu_free_ms = max(0.0, host_free_ms), 0.0
    if not step.streamed_ms or not _is_late(step, updates, host_free_ms):
        return ()
    chunks = [chunk for chunk, _ in updates]
    waiting = [Waiting(ms, step.streamed_ms.get(chunk, inf), step.needed_ms[chunk]) for chunk, ms in updates]
    found = []
    while waiting:
        if host_free_ms <= gpu_free_ms:
            host_free_ms += waiting.pop(0).host_ms
            del chunks[0]
            continue
        index = first_late(waiting, gpu_free_ms, host_free_ms, step.host_kept)
        if index is None:
            gpu_free_ms = host_free_ms  # when the GPU looks again
        else:
            gpu_free_ms += waiting.pop(index).device_ms
            found.append(chunks.pop(index))
    return tuple(found)


def _is_late(step: Step, updates: Updates, host_free_ms: float) -> bool:
    """Whether the host alone would be late with any of ``updates``."""
    end_ms, needed_ms = host_free_ms, step.needed_ms
    for chunk, duration in updates:
        end_ms += duration
        if end_ms > needed_ms[chunk]:
            return True
    return False
