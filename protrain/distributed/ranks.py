"""The ranks that train one model, and what all of them do together.

A rank is one process with one GPU. Every method here but the properties is a collective: all ranks must call it, in
one order. One rank alone has no process group, and its collectives do nothing.

[Note: communicators] Gathers of weights and reductions of gradients overlap, and one communicator would serialise them.
So each has a process group of its own. What the host must know at once (who has a gradient, whether all are in step)
goes through a third group of gloo, which no kernel on a GPU delays.

All tensors travel as bytes, because gloo does not send every type (int16, the master of bfloat16, among them), and
because no collective here does arithmetic but ``add_disjoint``. That one adds tensors of which at most one rank has
anything but zero at each place, so its result does not depend on the order of additions.

Every collective is noted by a watcher (``protrain.distributed.watch``), with what it is for. So ranks that get out of
step raise an error which says so.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.common.signals import StopRequests
from protrain.distributed.links import Links, first_difference
from protrain.distributed.watch import Watch, never_free

_ABSENT_S = 20.0  # how long a call that all ranks must make waits for the others
_CONNECTING_BYTES = 1024, 4 * 1024**2  # for each rank: NCCL has several ways to send, depending on the size
_MARGIN = timedelta(seconds=60)  # by which the watcher is earlier than the timeouts of backends

Value = TypeVar("Value")


def announced(variable: str, default: int) -> int:
    """The number that a launcher has set as ``variable`` of the environment, or else ``default``."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else default


class Ranks:
    """All ranks that train one model, seen from one of them.

    Args:
        group: the ranks. None: this process trains alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.several = self.size > 1
        self.on_node = min(announced("LOCAL_WORLD_SIZE", self.size), self.size)  # they share its host memory and cores
        self.received_bytes = 0  # of weights, from other ranks
        self.sent_bytes = 0  # of gradients, to other ranks
        self.requests = StopRequests()  # of which the ranks tell each other at the end of each backward
        if group is not None:
            self._communicators = _communicators(group)
            self._control = self._communicators.control
            self.watch = self._communicators.watch

    def use(self, device: torch.device) -> None:
        """Let tensors on ``device`` travel between the ranks. All ranks have a device of the same type.

        NCCL takes its memory of a GPU when the first tensor of a kind travels. So one of each kind travels here, and
        what is free afterwards is free for the training. In the first step there might be too little left.
        """
        if self.several:
            self._gathers, self._reductions = self._communicators.on(device)
        if self.several and device.type == "cuda":
            self.watch.during("the first use of the devices", partial(self._connect, device))

    def _connect(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # of this thread
        for size_bytes in _CONNECTING_BYTES:
            sent = torch.zeros(size_bytes, self.size, dtype=torch.uint8, device=device)
            received, what = torch.empty_like(sent), "the first tensors on the devices"
            self.gather(received.view(-1), what)
            self.exchange(received.view(-1), sent.view(-1), [size_bytes] * self.size, what)
            self.add_disjoint(sent, what)
        torch.cuda.synchronize(device)

    # -- staying in step -----------------------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        """Record that this rank begins ``what``, as all ranks do now. MisuseError if they are out of step."""
        if self.several:
            self.watch.note(what)

    def raised(self, error: BaseException | None, where: str) -> None:
        """Tell the other ranks that an exception leaves ``where`` on this one. They raise if they wait for it."""
        if self.several:
            self.watch.raised(error, where)

    @contextmanager
    def reporting(self, where: str) -> Iterator[None]:
        """A context whose exceptions ``raised`` is told."""
        try:
            yield
        except BaseException as error:
            self.raised(error, where)
            raise

    def all_in_step(self, value: Value, what: str, **limits: Any) -> list[Value]:
        """``all_values``, which raises a MisuseError on every rank if they have not done the same until now."""
        trails, values = zip(*self.all_values((self.watch.trail, value), what, **limits), strict=True)
        if any(trail != trails[0] for trail in trails):
            difference = first_difference(dict(enumerate(self.all_values(list(self.watch.notes)))))
            self.watch.refuse(difference or "the ranks have been out of step for long: start them anew")
        self.watch.agreed()
        return list(values)

    # -- on the device -------------------------------------------------------------------------------------------------

    def gather(self, whole: Tensor, what: str) -> None:
        """All-gather: fill ``whole``, 1-d, with the shards of all ranks. Each rank's shard is in its place already.

        Args:
            whole: on the device.
            what: the name of this collective in errors, as in all methods here.
        """
        self.watch.note(what, whole.nbytes)
        self.received_bytes += whole.nbytes - whole.nbytes // self.size
        self._all_gather(_bytes(whole), self._gathers)

    def exchange(self, received: Tensor, sent: Tensor, counts: Sequence[int], what: str) -> None:
        """All-to-all: send the first ``counts[0]`` elements of ``sent`` to rank 0, the next to rank 1, and so on.

        Args:
            received: [size x counts[rank]], written: the elements that every rank has sent to this one, in rank order.
            sent: [sum(counts)].
            counts: the same on all ranks.
            what: the name of this collective.
        """
        itemsize = sent.element_size()
        own = counts[self.rank] * itemsize
        self.watch.note(what, sent.nbytes)
        self.sent_bytes += sent.nbytes - own
        self._do(
            lambda: dist.all_to_all_single(
                _bytes(received),
                _bytes(sent),
                [own] * self.size,
                [count * itemsize for count in counts],
                group=self._reductions,
                async_op=not sent.is_cuda,
            )
        )

    def add_disjoint(self, values: Tensor, what: str) -> None:
        """All-reduce: add ``values`` of all ranks in place. At each element at most one rank has a value but zero."""
        self.watch.note(what, values.nbytes)
        group = self._reductions
        self._do(lambda: dist.all_reduce(values, group=group, async_op=not values.is_cuda))

    # -- on the host ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, what: str, *, source: int = 0) -> None:
        """Copy ``tensor`` of the rank ``source``, on the CPU and contiguous, to all ranks."""
        self.watch.note(what, tensor.nbytes)
        data = _bytes(tensor)
        self._do(lambda: dist.broadcast(data, group=self._control, group_src=source, async_op=True))

    def all_values(self, value: Value, what: str = "a comparison of values", **limits: Any) -> list[Value]:
        """The ``value`` of every rank, in rank order: any object that can be pickled.

        ``limits`` are the options of ``Watch.wait``.
        """
        if not self.several:
            return [value]
        self.watch.note(what)
        data = _pickled(value)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = data.numel()
        self._all_gather(sizes.view(torch.uint8), self._control, **limits)
        longest = int(sizes.max())
        every = torch.zeros(self.size * longest, dtype=torch.uint8)
        every[self.rank * longest :][: data.numel()] = data
        self._all_gather(every, self._control, **limits)
        found = zip(every.view(self.size, longest), sizes.tolist(), strict=True)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in found]

    def of_first(self, value: Value, what: str = "a value of rank 0") -> Value:
        """The ``value`` of the first rank."""
        return self.all_values(value if self.rank == 0 else cast(Value, None), what)[0]

    def agree(self, what: str, items: Sequence[object]) -> None:
        """MisuseError on every rank unless all have the same ``items``. It shows the first that differs."""
        every = self.all_values(list(items), f"the comparison of the {what}")
        for rank, others in enumerate(every):
            for first, other in zip_longest(every[0], others):
                if first != other:
                    raise MisuseError(
                        f"rank {rank} has another {what} than rank 0 ({other!r}, not {first!r}): build the same model "
                        "and pass the same arguments in every process"
                    )

    def meet(self, what: str) -> None:
        """Wait until all ranks have called ``what``.

        MisuseError within seconds if one does not, and if they did not all do the same before, such as the last step.
        """
        if self.several:
            remedy = f"Call {what} in every process: only what is done with its result may stand under `if rank == 0`"
            self.all_in_step(None, what, timeout_s=_ABSENT_S, absent=remedy)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _all_gather(self, data: Tensor, group: dist.ProcessGroup, **limits: Any) -> None:
        """All-gather ``data``, 1-d, of which each rank has filled its slice."""
        own = data.view(self.size, -1)[self.rank]
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
        self._do(lambda: gather(data, own, group=group, async_op=not data.is_cuda), **limits)

    def _do(self, collective: Callable[[], dist.Work | None], **limits: Any) -> None:
        """Issue ``collective``. The host waits for one on the CPU, and the current stream for one on a GPU."""
        try:
            work = collective()
        except RuntimeError as error:  # such as a communicator that the watcher has just aborted
            self.watch.fail(error)
        if work is not None:
            self.watch.wait(work, **limits)


class Communicators:
    """The groups of [Note: communicators], and the watcher of what goes through them.

    All models share them that a group trains. The watcher begins before anything is known of devices, so that an error
    in the arguments of one rank is heard of by all.

    Args:
        rank: of this process.
        members: the ranks of the default group that train together.
        store: of the default group.
        timeout: of a collective.
    """

    def __init__(self, rank: int, members: Sequence[int], store: dist.Store, timeout: timedelta) -> None:
        self._rank = rank
        self._members = list(members)
        self._timeout = timeout
        self._groups: list[tuple[dist.ProcessGroup, str]] = []
        self._by_backend: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        met = "-".join(map(str, members))
        _meetings[met] += 1
        self._name = f"protrain/{_meetings[met]} of {met}"
        links = Links(rank, len(members), dist.PrefixStore(self._name, store))
        self.watch = Watch(rank, len(members), links, timeout_s=timeout.total_seconds(), abort=self._abort)

    def serve(self, group: dist.ProcessGroup) -> None:
        """Be the communicators of ``group``, as long as it is there."""
        _known[group] = self
        weakref.finalize(group, self.watch.end)  # it is called when Python ends, too

    @cached_property
    def control(self) -> dist.ProcessGroup:
        """The group for what the host must know at once."""
        return self._new("gloo")

    def on(self, device: torch.device) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The groups for gathers and for reductions of tensors on ``device``."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        if backend not in self._by_backend:
            self._by_backend[backend] = self._new(backend), self._new(backend)
        return self._by_backend[backend]

    def _new(self, backend: str) -> dist.ProcessGroup:
        """A process group of the members, which they alone start.

        ``dist.new_group`` would name it by how many groups this process belongs to. Members of which one belongs to
        more groups than another, such as one of rank 0 alone, would then look for each other under different names.
        """
        torch_groups: Any = dist.distributed_c10d
        start = partial(
            torch_groups._new_process_group_helper,
            len(self._members),
            self._rank,
            self._members,
            backend,
            torch_groups._get_default_store(),
            f"{self._name}/{len(self._groups)}",
            timeout=self._timeout + _MARGIN,  # the watcher ends a wait before a backend would in its own way
        )
        group: dist.ProcessGroup = self.watch.during(f"the start of a process group of {backend}", start)[0]
        torch_groups._world.pg_group_ranks[group] = {member: rank for rank, member in enumerate(self._members)}
        self._groups.append((group, backend))
        return group

    def _abort(self) -> None:
        for group, backend in self._groups:
            if backend == "nccl":
                group.abort()
            else:  # gloo can end nothing that has begun
                never_free(group)


_known: WeakKeyDictionary[dist.ProcessGroup, Communicators] = WeakKeyDictionary()
_meetings: Counter[str] = Counter()  # of the same ranks so far, which all of them count alike


def _communicators(group: dist.ProcessGroup) -> Communicators:
    """The communicators of ``group``. New ones, if its ranks got out of step before.

    All ranks must find the same. So a rank first hears what others have told, who may train anew already.
    """
    known = _known.get(group)
    if known is not None:
        known.watch.settle()
    if known is None or known.watch.decided is not None:
        timeout = group._get_backend(group._device_types[0]).options._timeout
        members, store = dist.get_process_group_ranks(group), dist.distributed_c10d._get_default_store()
        known = Communicators(dist.get_rank(group), members, store, timeout)
        known.serve(group)
    return known


def _pickled(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
