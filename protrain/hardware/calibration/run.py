"""``calibrate``: measure everything that the planner needs to know of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from protrain.distributed.devices import own_device, refuse_shared_gpu
from protrain.distributed.joining import join, local_rank
from protrain.distributed.ranks import Ranks
from protrain.hardware.cache import Machine, store
from protrain.hardware.calibration.contention import Together, groups_on
from protrain.hardware.calibration.ranks import Collectives, most_contended, slowest
from protrain.hardware.calibration.rates import (
    CPU,
    AdamChunk,
    Products,
    StreamedChunk,
    Transfers,
    adam_durations_s,
    best_threads,
    copy_gbps,
    dram_gbps,
    flatten_gbps,
    pack_gbps,
    pinned,
    random_tensor,
    thread_counts,
)
from protrain.hardware.calibration.report import clock_warnings, link_warnings, machine_warnings, pinning_warnings
from protrain.hardware.calibration.timing import FULL_SECONDS, Effort, load, one_core_taken, quintiles_of, rate
from protrain.hardware.detection import assume
from protrain.hardware.memory import usable_cores
from protrain.hardware.nvml import gpu_facts
from protrain.hardware.profile import Contention, HardwareProfile

Progress = Callable[[str, float], object]
_LOADED_S = 0.3  # of queued work, during which the card is asked for its clocks and its link
# Seconds of each stage in a calibration of FULL_SECONDS. The groups of activities share the rest of the time.
_MATMUL_S, _COPY_S, _TRANSFERS_S, _DRAM_S, _ADAM_S, _STREAMED_S, _KERNEL_S = 2.0, 0.5, 1.5, 1.5, 0.4, 0.75, 0.4
_GROUP_S, _COLLECTIVE_S = 0.9, 0.4  # a group; a size
_ROUNDS = 2  # over all groups
_MOMENTS = 3  # when the host's AdamW is measured
_OPTIONAL = "streamed_adam_gparams", "all_gather_gbps", "all_to_all_gbps"  # not measured on every machine
_WHOLE, _WEIGHT, _NARROW = "host_adam_gparams", "host_adam_weight_gparams", "host_adam_narrow_gparams"


def calibrate(
    device: torch.device | str | None = None,
    *,
    seconds: float = FULL_SECONDS,
    save: bool = True,
    progress: Progress | None = None,
) -> HardwareProfile:
    """Measure ``device`` and its host. Later calls that detect the machine use what was measured.

    A full calibration takes half a minute, up to 3 GiB of the device's memory and 14 GiB of the host's. The machine
    should be idle. Under torchrun every process calls this function, which joins or starts the process group as
    ``protrain.wrap`` does. All of them measure at the same time, and each gets the rates of the slowest.

    Args:
        device: "cuda", "cuda:1" or "cpu". None means a GPU where there is one. Which GPU "cuda" is, ``protrain.wrap``
            says.
        seconds: how long to measure. Less than 30 makes sizes smaller and rates rougher, for a trial with save=False.
        save: keep the profile in the user's cache (``protrain.hardware.cache``).
        progress: called with what is measured next, and with how much is done, from 0 to 1.

    Raises:
        ValueError: ``seconds`` is not positive, there is no such device, or two processes are on one GPU.
        MisuseError: another process has failed.
    """
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds must be more than 0, not {seconds!r}")
    ranks = join(None)
    with ranks.reporting("protrain.calibrate"), contextlib.ExitStack() as stack:
        target = own_device(device)
        refuse_shared_gpu(ranks, target)
        machine, own = Machine.of(target), assume(target)
        names, device_bytes, host_bytes = zip(
            *ranks.all_values((machine.name, own.device_bytes, own.host_bytes), "the memory of all ranks"), strict=True
        )
        # All ranks must measure in the same sizes, and a plan for them has to fit the least memory.
        base = replace(own, device_bytes=min(device_bytes), host_bytes=min(host_bytes))
        if target.type == "cuda":
            stack.enter_context(torch.cuda.device(target))
            stack.callback(torch.cuda.empty_cache)  # the caller may want all of the card next
        threads = max(1, usable_cores() // ranks.on_node)
        before = torch.get_num_threads()
        stack.callback(torch.set_num_threads, before)
        torch.set_num_threads(threads)
        effort = Effort(
            seconds=seconds,
            host_room_bytes=base.host_bytes // ranks.on_node,
            device_room_bytes=base.device_bytes,
        )
        measuring = Calibration(target, effort, ranks, threads=threads, progress=progress)
        measuring.warnings = machine_warnings(effort, names, torch_threads=before, cores=threads)
        measuring.measure_all()
        profile = measuring.profile(replace(base, source="measured", **vars(machine)))
        del measuring
        # One process of every host stores it, as hosts may not share a home, and one for each kind of GPU there.
        if save and machine.name not in names[ranks.rank - local_rank() : ranks.rank]:
            store(profile, machine)
        ranks.all_values(None, "the end of the calibration")  # a rank that looks for the profile now will find it
    return profile


class Calibration:
    """One run over everything, a stage at a time. What was found lies in its attributes."""

    def __init__(
        self, device: torch.device, effort: Effort, ranks: Ranks, *, threads: int, progress: Progress | None
    ) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.effort = effort
        self.ranks = ranks
        self.rates: dict[str, float] = {}  # by the names of the profile's fields
        self.contention: list[Contention] = []
        self.warnings: list[str] = []
        self._moments_s: dict[str, list[list[float]]] = {_WHOLE: [], _WEIGHT: [], _NARROW: []}
        self._thread_counts = thread_counts(threads, taken=int(self.on_gpu))  # one_core_taken takes the one core
        self._products = Products(device, effort)
        self._progress = progress
        self._done_s = 0.0
        self._total_s = self._planned_s()

    def _planned_s(self) -> float:
        alone = _MATMUL_S + _COPY_S + _TRANSFERS_S + _DRAM_S + 2 * _KERNEL_S
        host_adam = len(self._thread_counts) + 3 * _MOMENTS
        optimizers = (host_adam + 1) * _ADAM_S + self.on_gpu * _STREAMED_S
        together = len(groups_on(self.device, self.ranks.size)) * _GROUP_S
        sizes = len(self.effort.transfer_bytes) * self.ranks.several
        return alone + optimizers + together + sizes * _COLLECTIVE_S

    @contextlib.contextmanager
    def _stage(self, what: str, full_s: float) -> Iterator[float]:
        """A stage that takes ``full_s`` in a full calibration. Yields the seconds that it has in this one."""
        if self._progress is not None:
            self._progress(what, min(1.0, self._done_s / self._total_s))
        self.ranks.all_values(None, f"the calibration of {what}")  # so that all start together
        yield full_s * self.effort.time
        self._done_s += full_s

    def measure_all(self) -> None:
        """Run every stage in turn. Most buffers of one stage are gone before the next."""
        self._device_alone()
        accepted = self._transfers()
        chunks = [AdamChunk.on(CPU, self.effort.adam_elements) for _ in range(self.effort.host_chunks)]
        self._host_alone(chunks[0])
        self._host_adam(chunks)
        self._optimizers_and_kernels()
        self._host_adam(chunks)
        collectives = self._collectives() if self.ranks.several else None
        accepted &= self._together(chunks, collectives)
        self._host_adam(chunks)
        self.warnings += pinning_warnings(pinned=accepted)
        self._over_time(sum(chunk.elements for chunk in chunks) / 1e9)
        found = self.ranks.all_values((self.rates, self.contention, self.warnings), "what was measured")
        of_ranks, groups, warnings = zip(*found, strict=True)
        self.rates, self.contention = slowest(of_ranks), most_contended(groups)
        self.warnings = list(
            dict.fromkeys(
                line if all(line in each for each in warnings) else f"rank {rank}: {line}"
                for rank, lines in enumerate(warnings)
                for line in lines
            )
        )
        if self._progress is not None:
            self._progress("done", 1.0)

    def _device_alone(self) -> None:
        with self._stage("matrix products", _MATMUL_S) as budget_s:
            self._products.settle(time_share=min(1.0, self.effort.time))
            self.rates["matmul_tflops"] = self._products.tflops(budget_s=budget_s / 2)
            load(self._products.run, self.device, _LOADED_S)
            self.warnings += clock_warnings(gpu_facts(self.device))
        with self._stage("device memory", _COPY_S) as budget_s:
            self.rates["device_copy_gbps"] = copy_gbps(self.device, self.effort.tensor_bytes, budget_s=budget_s)

    def _transfers(self) -> bool:
        sizes = self.effort.transfer_bytes
        transfers = Transfers(self.device, max(sizes))
        with pinned(*transfers.host, device=self.device) as accepted:
            for size in sizes:
                with self._stage("copies between host and device", _TRANSFERS_S / len(sizes)) as budget_s:
                    self._keep_best(transfers.gbps(size, budget_s=budget_s))
            load(transfers.up, self.device, _LOADED_S)
            self.warnings += link_warnings(gpu_facts(self.device))
        return accepted

    def _keep_best(self, rates: dict[str, float]) -> None:
        """Of several sizes the best counts. Whatever else a machine does in between can only make it slower."""
        self.rates |= {name: max(found, self.rates.get(name, 0.0)) for name, found in rates.items()}

    def _host_alone(self, chunk: AdamChunk) -> None:
        """The host's memory, and the best number of threads for its AdamW."""
        with self._stage("host memory", _DRAM_S) as budget_s:
            self.rates["host_dram_gbps"] = dram_gbps(self.effort.tensor_bytes, budget_s=budget_s)
        own = [
            median(self._on_host([chunk], partial(AdamChunk.update, threads=count))) for count in self._thread_counts
        ]
        of_ranks = self.ranks.all_values(own, "AdamW by number of threads")
        self._adam_threads = best_threads(dict(zip(self._thread_counts, map(max, *of_ranks, own), strict=True)))

    def _host_adam(self, chunks: Sequence[AdamChunk]) -> None:
        """The host's AdamW with the best number of threads, at one moment, over all ``chunks``.

        In steps on the host of a virtual machine some chunks took a third longer than others, always the same ones, and
        other users of such a host slow all chunks for seconds. A step updates tens of gigabytes.
        """
        threads, elements, bf16 = self._adam_threads, chunks[0].elements, torch.bfloat16
        weight = torch.empty_like(chunks[0].weight)
        moments = random_tensor(elements, bf16, CPU), random_tensor(elements, bf16, CPU, positive=True)
        ways = {
            _WHOLE: partial(AdamChunk.update, threads=threads),
            _WEIGHT: partial(AdamChunk.make_weight, new_weight=weight, threads=threads),
            _NARROW: partial(AdamChunk.update, threads=threads, moments=moments),
        }
        for name, update in ways.items():
            self._moments_s[name].append(self._on_host(chunks, update))

    def _on_host(self, chunks: Sequence[AdamChunk], update: Callable[[AdamChunk], None]) -> list[float]:
        # In a step on a GPU the launching thread takes a core. On a CPU that thread does the updates itself.
        with self._stage("AdamW on the host", _ADAM_S) as budget_s, one_core_taken(wanted=self.on_gpu):
            return adam_durations_s(chunks, update, CPU, budget_s=budget_s)

    def _over_time(self, gparams: float) -> None:
        """The rates of the host's AdamW on ``gparams`` 1e9 parameters, from the seconds at several moments.

        In a step the host updates dozens of chunks, and the step takes as long as all of them together. Where a third
        of them take half as long again, as on a host with neighbours, the median does not show it.
        """
        self.rates |= {name: gparams / fmean(map(fmean, moments)) for name, moments in self._moments_s.items()}
        slow_s = fmean(quintiles_of(durations)[1] for durations in self._moments_s[_WHOLE])
        self.rates["host_adam_p20_gparams"] = gparams / slow_s

    def _optimizers_and_kernels(self) -> None:
        with self._stage("AdamW on the device", _ADAM_S) as budget_s:
            chunk = AdamChunk.on(self.device, self.effort.adam_elements)
            self.rates["device_adam_gparams"] = rate(chunk.update, self.device, chunk.elements / 1e9, budget_s=budget_s)
            del chunk
        if self.on_gpu:
            with self._stage("AdamW on the device, states on the host", _STREAMED_S) as budget_s:
                streamed = StreamedChunk(self.device, self.effort.adam_elements)
                with pinned(*streamed.chunk, device=self.device) as accepted:
                    if self._all_have(accepted):
                        self.rates["streamed_adam_gparams"] = streamed.gparams(budget_s=budget_s)
                del streamed
        for name, kernel in (("flatten_gbps", flatten_gbps), ("pack_gbps", pack_gbps)):
            with self._stage("flatten and pack", _KERNEL_S) as budget_s:
                self.rates[name] = kernel(self.device, self.effort.hidden, budget_s=budget_s)

    def _all_have(self, accepted: bool) -> bool:
        """Whether all ranks could pin their memory. They must go the same way, or would wait for each other."""
        return all(self.ranks.all_values(accepted, "whether memory can be pinned"))

    def _together(self, chunks: Sequence[AdamChunk], collectives: Collectives | None) -> bool:
        together = Together(
            self.device, self.effort, self._products, chunks, threads=self._adam_threads, collectives=collectives
        )
        groups = groups_on(self.device, self.ranks.size)
        with together.ready() as accepted:
            for group in groups * _ROUNDS if self._all_have(accepted) else ():
                with self._stage(" + ".join(group), _GROUP_S / _ROUNDS) as budget_s, one_core_taken(wanted=self.on_gpu):
                    together.measure(group, duration_s=budget_s)
        self.contention = together.contention()
        return accepted

    def _collectives(self) -> Collectives:
        sizes = self.effort.transfer_bytes
        self.ranks.use(self.device)
        collectives = Collectives(self.ranks, self.device, max(sizes))
        for size in sizes:
            with self._stage("collectives", _COLLECTIVE_S) as budget_s:
                self._keep_best(collectives.gbps(size, budget_s=budget_s))
        return collectives

    def profile(self, base: HardwareProfile) -> HardwareProfile:
        """``base`` with the rates that were found."""
        rates: dict[str, Any] = dict.fromkeys(_OPTIONAL) | self.rates
        return replace(
            base,
            composed=(),
            host_adam_threads=self._adam_threads,
            contention=tuple(self.contention),
            warnings=tuple(self.warnings),
            **rates,
        )
