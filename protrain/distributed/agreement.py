"""What the ranks agree on: the machine, the profile and the plan before they train, and whether an action succeeded."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch

from protrain.distributed.aside import Aside
from protrain.distributed.processes import local_processes
from protrain.distributed.ranks import Ranks
from protrain.hardware.profile import HardwareProfile
from protrain.planning.plan import Plan
from protrain.profiler.model_profile import ModelProfile

_MEASURED_BYTES = 64 * 1024**2  # of a tensor that is gathered or exchanged to see how fast that is
_WARM_UP, _RUNS = 2, 5
_PRODUCT = 4096  # rows and columns of the matrices that are multiplied beside collectives
_PRODUCTS = 20
_BESIDE = 40  # collectives, which take longer than the products on every link
_TIMING = "the timing of collectives"


def of_all(ranks: Ranks, own: HardwareProfile, device: torch.device) -> HardwareProfile:
    """The machine of each rank, for a plan that fits all of them: the least memory, and otherwise that of the first.

    The ranks of a node share its host memory and its cores. If the machine was calibrated by one process, or not at
    all, nothing is known of collectives. Then GPUs measure them now, which takes a tenth of a second, because NVLink is
    ten times as fast as what would have to be assumed.
    """
    if not ranks.several:
        return own
    share = replace(own.shared_by(min(local_processes(), ranks.size)), world_size=ranks.size)
    if device.type == "cuda" and not all(
        ranks.all_values(share.all_gather_gbps is not None, "whether collectives are measured")
    ):
        gathered_gbps, exchanged_gbps, kept = _measure(ranks, device)
        share = replace(
            share,
            all_gather_gbps=gathered_gbps,
            reduce_scatter_gbps=exchanged_gbps,
            compute_beside_collectives=kept,
        )
    every = ranks.all_values(share, "the machine of all ranks")
    return replace(
        every[0],
        device_bytes=min(each.device_bytes for each in every),
        host_bytes=min(each.host_bytes for each in every),
        all_gather_gbps=_least([each.all_gather_gbps for each in every]),
        reduce_scatter_gbps=_least([each.reduce_scatter_gbps for each in every]),
        compute_beside_collectives=_least([each.compute_beside_collectives for each in every]),
    )


def _least(rates_gbps: list[float | None]) -> float | None:
    known = [rate for rate in rates_gbps if rate is not None]
    return min(known) if len(known) == len(rates_gbps) else None


def _measure(ranks: Ranks, device: torch.device) -> tuple[float, float, float]:
    """How fast collectives are on this rank, and what they leave of its computing.

    Returns:
        GB/s that it receives from the others in a gather, and in the exchange of a reduction, and the share of its rate
        that a matrix product keeps beside them.
    """
    whole = torch.zeros(_MEASURED_BYTES // ranks.size * ranks.size, dtype=torch.uint8, device=device)
    received, counts = torch.zeros_like(whole), [whole.numel() // ranks.size] * ranks.size
    rates = []
    collectives = partial(ranks.gather, whole, _TIMING), partial(ranks.exchange, received, whole, counts, _TIMING)
    for run in collectives:
        for _ in range(_WARM_UP):
            run()
        torch.cuda.synchronize(device)
        begin = perf_counter()
        for _ in range(_RUNS):
            run()
        torch.cuda.synchronize(device)
        from_others = whole.numel() * (ranks.size - 1) / ranks.size
        rates.append(_RUNS * from_others / (perf_counter() - begin) / 1e9)
    matrix = torch.zeros(_PRODUCT, _PRODUCT, dtype=torch.bfloat16, device=device)
    product, side = torch.empty_like(matrix), torch.cuda.Stream(device)

    def products_ms() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix, out=product)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    products_ms()  # which loads the kernel
    alone = products_ms()
    with torch.cuda.stream(side):
        for at in range(_BESIDE):
            collectives[at % 2]()
    beside = products_ms()
    torch.cuda.synchronize(device)
    return rates[0], rates[1], min(1.0, alone / beside)


def largest_of_all(ranks: Ranks, own: ModelProfile) -> ModelProfile:
    """The profile of the rank whose batch calls most units and takes most memory."""
    every = ranks.all_values(own, "the profile of all ranks")
    return max(every, key=lambda each: (len(each.calls), each.tokens, _peak_bytes(each)))


def plan_of_first(ranks: Ranks, plan: Callable[[], Plan]) -> Plan:
    """The plan of the first rank. An error in it is raised on every rank."""
    found: Plan | None = None
    with raised_on_all(ranks):
        if ranks.rank == 0:
            found = plan()
    found = ranks.of_first(found, "the plan of rank 0")
    assert found is not None
    return found


@contextmanager
def raised_on_all(ranks: Ranks | Aside) -> Iterator[None]:
    """An error inside, on any rank, is raised on all of them when the last one has come to the end of the block.

    So no rank goes on alone with something that has failed on another. Each rank raises its own error if it has one,
    and otherwise that of the first rank that has.
    """
    if not ranks.several:
        yield
        return
    own: BaseException | None = None
    try:
        yield
    except BaseException as error:  # Ctrl-C, too: the others wait for this rank
        own = error
    errors = ranks.all_values(None if own is None else _sendable(own), "whether a rank has failed")
    if own is not None:
        raise own
    for rank, other in enumerate(errors):
        if other is not None:
            other.add_note(f"This error was raised on rank {rank}, and rank {ranks.rank} was told of it.")
            raise other


def _sendable(error: BaseException) -> Exception:
    """``error`` as an exception that another process can load and raise."""
    if isinstance(error, Exception):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # the constructors of some exceptions need more arguments than they keep
            pass
        else:
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _peak_bytes(profile: ModelProfile) -> int:
    return max((segment.live_bytes + segment.peak_bytes for segment in profile.segments), default=0)
