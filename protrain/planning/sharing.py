"""Who updates a chunk in host memory once the norm is known: the host, or the GPU (not in the paper).

Updates wait in one queue, in the order in which the next forward needs their chunks. The host takes the first. The GPU
takes the first one that the host would not finish in time and that the GPU would finish sooner, if forward then waits
for less. It may wait for more, as the host is slower while the GPU streams states from the same memory, and as these
states take the link from uploads of weights. So a slow host gets help, but not one that is almost as fast as forward
needs it to be, and not where the link is what forward waits for. The engine asks ``next_for_gpu`` with the rates that
it has measured in this run, and the runtime model with those of calibration. Who updates a chunk changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_WORTH = 0.2  # what forward must be spared to make help worth it, as a share of what the update takes the host


class Sharing(NamedTuple):
    """What the engine must know to share updates: predictions, until it has measured the rates itself."""

    needed_ms: tuple[float, ...]  # by chunk: from the norm until its upload must begin, if forward waits for none
    upload_ms: tuple[float, ...]  # by chunk: how long its weight takes the link while the host updates others
    states_ms: tuple[float, ...]  # by chunk: the same of what goes to the GPU for an update there
    host_gparams: float  # 1e9 parameters a second
    device_gparams: float  # beside the host
    host_kept: float  # the share of its rate that the host keeps while the GPU updates a chunk in host memory
    staging_bytes: int  # device memory through which the states of a chunk pass


class Waiting(NamedTuple):
    """An update that nobody has begun."""

    host_ms: float  # what it takes the host
    device_ms: float  # what it takes the GPU; infinite if the GPU cannot do it
    needed_ms: float  # when the chunk's upload must begin, if forward has waited for none before
    upload_ms: float  # what the upload takes the link
    states_ms: float  # what all that goes to the GPU takes the link if the GPU does it


def next_for_gpu(waiting: Sequence[Waiting], now_ms: float, host_free_ms: float, host_kept: float) -> int | None:
    """The index of the update that the GPU takes now, None if it takes none: see the rule at the top of this file.

    Args:
        waiting: updates in the order in which the host takes them. Their times have the same zero as these:
        now_ms: the present.
        host_free_ms: when the host is done with what it has begun.
        host_kept: the share of its rate that the host keeps beside an update by the GPU, from 0 (exclusive) to 1.
    """
    index, late_ms, link_ms, end_ms = None, 0.0, now_ms, max(now_ms, host_free_ms)
    for at, (host_ms, device_ms, needed_ms, upload_ms, _) in enumerate(waiting):  # thousands of times in a search
        end_ms += host_ms
        start_ms = end_ms if end_ms > link_ms else link_ms
        link_ms = start_ms + upload_ms
        if start_ms - needed_ms > late_ms:
            late_ms = start_ms - needed_ms
        if index is None and end_ms > needed_ms and now_ms + device_ms < end_ms:
            index = at
    if index is None:
        return None
    taken = waiting[index]
    # The states are taken to go to the GPU first. In truth they share the link with weights updated meanwhile.
    back_ms, link_ms, end_ms = now_ms + taken.device_ms, now_ms + taken.states_ms, max(now_ms, host_free_ms)
    updated = [(back_ms, taken)]
    for update in (*waiting[:index], *waiting[index + 1 :]):
        beside_ms = max(0.0, min(update.host_ms / host_kept, back_ms - end_ms))
        end_ms += update.host_ms + beside_ms * (1.0 - host_kept)
        updated.append((end_ms, update))
    helped_ms = 0.0
    for updated_ms, update in sorted(updated):  # as they are uploaded
        start_ms = max(updated_ms, link_ms)
        link_ms = start_ms + update.upload_ms
        helped_ms = max(helped_ms, start_ms - update.needed_ms)
    return index if late_ms - helped_ms > _WORTH * taken.host_ms else None
