"""The ranks that train one model, and what all of them do together.

A rank is one process with one GPU. Every method here but the properties is a collective: all ranks must call it, in
one order. One rank alone has no process group, and its collectives do nothing.

[Note: communicators] Gathers of weights and reductions of gradients overlap, and one communicator would serialise them.
So each has a process group of its own. What the host must know at once (who has a gradient, whether all are in step)
goes through a third group of gloo, which no kernel on a GPU delays.

All tensors travel as bytes, because gloo does not send every type (int16, the master of bfloat16, among them), and
because no collective here does arithmetic but ``add_disjoint``. That one adds tensors of which at most one rank has
anything but zero at each place, so its result does not depend on the order of additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from protrain.common.collectives import all_gather
from protrain.common.errors import MisuseError

_ABSENT_S = 20.0  # how long a call that all ranks must make waits for the others

Value = TypeVar("Value")


class Ranks:
    """All ranks that train one model, seen from one of them.

    Args:
        group: the ranks. None: this process trains alone.
        device: the device of this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.received_bytes = 0  # of weights, from other ranks
        self.sent_bytes = 0  # of gradients, to other ranks
        if group is None:
            return
        self._gathers, self._reductions, self._control = _communicators(group, device)
        self._members = dist.get_process_group_ranks(group)

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    # -- on the device -------------------------------------------------------------------------------------------------

    def gather(self, whole: Tensor) -> None:
        """Fill ``whole``, 1-d, with the shards of all ranks. Each rank's own shard is in its place already."""
        data = _bytes(whole)
        shard = data.numel() // self.size
        self.received_bytes += data.numel() - shard
        all_gather(data, data[self.rank * shard : (self.rank + 1) * shard], self._gathers)

    def exchange(self, received: Tensor, sent: Tensor, counts: Sequence[int]) -> None:
        """Send the first ``counts[0]`` elements of ``sent`` to rank 0, the next to rank 1, and so on.

        Args:
            received: [size x counts[rank]], written: the elements that every rank has sent to this one, in rank order.
            sent: [sum(counts)].
            counts: the same on all ranks.
        """
        itemsize = sent.element_size()
        own = counts[self.rank] * itemsize
        self.sent_bytes += sent.nbytes - own
        dist.all_to_all_single(
            _bytes(received),
            _bytes(sent),
            [own] * self.size,
            [count * itemsize for count in counts],
            group=self._reductions,
        )

    def add_disjoint(self, values: Tensor) -> None:
        """Add ``values`` of all ranks in place. At each element at most one rank has another value than zero."""
        dist.all_reduce(values, group=self._reductions)

    # -- on the host ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy ``tensor`` of the rank ``source``, on the CPU and contiguous, to all ranks."""
        dist.broadcast(_bytes(tensor), self._members[source], group=self._control)

    def all_values(self, value: Value) -> list[Value]:
        """The ``value`` of every rank, in rank order: any object that can be pickled."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def of_first(self, value: Value) -> Value:
        """The ``value`` of the first rank."""
        if not self.several:
            return value
        found: list[Any] = [value]
        dist.broadcast_object_list(found, self._members[0], group=self._control)
        result: Value = found[0]
        return result

    def agree(self, what: str, items: Sequence[object]) -> None:
        """MisuseError on every rank unless all have the same ``items``. It shows the first that differs."""
        every = self.all_values(list(items))
        for rank, others in enumerate(every):
            for first, other in zip_longest(every[0], others):
                if first != other:
                    raise MisuseError(
                        f"rank {rank} has another {what} than rank 0 ({other!r}, not {first!r}): build the same model "
                        "and pass the same arguments in every process"
                    )

    def meet(self, what: str) -> None:
        """Wait until all ranks have called ``what``. MisuseError within seconds if one does not."""
        if not self.several:
            return
        how = dist.BarrierOptions()  # of monitored_barrier only the first rank obeys the timeout
        how.timeout = timedelta(seconds=_ABSENT_S)
        try:
            self._control.barrier(how).wait()
        except RuntimeError as error:
            raise MisuseError(
                f"{what} must be called in every process, and rank {self.rank} waited {_ABSENT_S:.0f} s for others: "
                "call it on all ranks, and let rank 0 alone print or write what it returns"
            ) from error


_known: WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]] = WeakKeyDictionary()


def _communicators(group: dist.ProcessGroup, device: torch.device) -> tuple[dist.ProcessGroup, ...]:
    """The three groups of [Note: communicators], which all models that ``group`` trains share."""
    if group not in _known:
        members = dist.get_process_group_ranks(group)
        backend = "nccl" if device.type == "cuda" else "gloo"
        _known[group] = tuple(
            dist.new_group(members, backend=kind, use_local_synchronization=True)  # others need not call it
            for kind in (backend, backend, "gloo")
        )
    return _known[group]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
