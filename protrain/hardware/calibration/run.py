"""``calibrate``: measure everything that the planner and the reader of a report need to know of this machine."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from protrain.distributed.devices import has_bf16, own_device, refuse_shared_gpu
from protrain.distributed.joining import join, local_rank
from protrain.distributed.ranks import Ranks
from protrain.hardware.cache import Machine, store
from protrain.hardware.calibration.contention import Together, groups_on
from protrain.hardware.calibration.optimizers import (
    ADAM_BYTES,
    STREAMED_BYTES,
    AdamChunk,
    StreamedChunk,
    adam_figure,
    best_threads,
    thread_counts,
)
from protrain.hardware.calibration.ranks import Collectives, most_contended, slowest
from protrain.hardware.calibration.rates import Products, copy_figures, dram_figures, flatten_figure, pack_figure
from protrain.hardware.calibration.report import (
    bf16_warnings,
    clock_warnings,
    host_warnings,
    kind_warnings,
    link_warnings,
    pinning_warnings,
    rank_warnings,
    size_warnings,
    thread_warnings,
    threads_of,
    warnings_of_ranks,
)
from protrain.hardware.calibration.tensors import CPU, pinned, random_tensor
from protrain.hardware.calibration.timing import FULL_SECONDS, Effort, load, one_core_taken
from protrain.hardware.calibration.transfers import Transfers
from protrain.hardware.datasheet import Datasheet, of_card, pcie_gbps
from protrain.hardware.detection import assume
from protrain.hardware.memory import usable_cores
from protrain.hardware.nvml import gpu_facts
from protrain.hardware.profile import Contention, Figure, HardwareProfile

Progress = Callable[[str, float], object]
_LOADED_S = 0.3  # of queued work, during which the card is asked for its clocks and its link
# Seconds of each stage in a calibration of FULL_SECONDS. The groups of activities share the rest of the time.
_MATMUL_S, _COPY_S, _TRANSFERS_S, _DRAM_S, _ADAM_S, _STREAMED_S, _KERNEL_S = 2.0, 0.5, 3.0, 1.5, 0.4, 0.75, 0.4
_GROUP_S, _COLLECTIVE_S = 0.9, 0.4  # a group; a size
_ROUNDS = 2  # over all groups
_LARGEST = 3  # the sizes that no cache holds
_MOMENTS = ("over much memory", "the same later", "and once more")  # when the host's AdamW is measured
_WHOLE, _WEIGHT, _NARROW = "host AdamW", "host AdamW, the weight", "host AdamW, moments in bf16"
_BY_SIZE = ("h2d", "d2h", "both ways", "all_gather", "all_to_all")


def calibrate(
    device: torch.device | str | None = None,
    *,
    seconds: float = FULL_SECONDS,
    save: bool = True,
    progress: Progress | None = None,
) -> HardwareProfile:
    """Measure ``device`` and its host. Later calls that detect the machine use what was measured.

    A full calibration takes under a minute, up to 3 GiB of the device's memory and 14 GiB of the host's. The machine
    should be idle. Under torchrun every process calls this function, which joins or starts the process group as
    ``protrain.wrap`` does. All of them measure at the same time, and each gets the figures of the slowest.

    Args:
        device: "cuda", "cuda:1" or "cpu". None means a GPU where there is one. Which GPU "cuda" is, ``protrain.wrap``
            says.
        seconds: how long to measure. Less than 30 makes sizes smaller and figures rougher, for a trial with save=False.
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
        measuring.warnings += [*kind_warnings(names), *bf16_warnings(has_bf16=has_bf16(target))]
        measuring.measure_all(torch_threads=before)
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
        self.threads = threads
        self.figures: list[Figure] = []
        self.contention: list[Contention] = []
        self.warnings = size_warnings(effort)
        self._thread_counts = thread_counts(threads, taken=int(self.on_gpu))  # one_core_taken takes the one core
        self._adam_threads = threads
        self._products = Products(device, effort)
        self._progress = progress
        self._done_s = 0.0
        self._total_s = self._planned_s()

    def _planned_s(self) -> float:
        alone = _MATMUL_S + _COPY_S + _TRANSFERS_S + _DRAM_S + 2 * _KERNEL_S
        host_adam = len(self._thread_counts) + 3 * len(_MOMENTS)
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

    def measure_all(self, *, torch_threads: int) -> None:
        """Run every stage in turn. Most buffers of one stage are gone before the next.

        Args:
            torch_threads: how many threads torch was going to use.
        """
        self._device_alone()
        accepted = [self._transfers()]
        chunks = [AdamChunk.on(CPU, self.effort.adam_elements) for _ in range(self.effort.host_chunks)]
        self._host_alone(chunks[0], torch_threads=torch_threads)
        self._host_adam(chunks, _MOMENTS[0])
        self._optimizers_and_kernels()
        self._host_adam(chunks, _MOMENTS[1])
        collectives = self._collectives() if self.ranks.several else None
        accepted.append(self._together(chunks, collectives))
        self._host_adam(chunks, _MOMENTS[2])
        self.warnings += [*host_warnings(self._at_moments(_WHOLE)), *pinning_warnings(accepted)]
        self._combine()
        if self._progress is not None:
            self._progress("done", 1.0)

    def _combine(self) -> None:
        """Make what all ranks have found the figures, groups and warnings of this one, beside what makers promise."""
        facts = gpu_facts(self.device)
        link_gbps = None if facts is None else pcie_gbps(facts.pcie_generation_max, facts.pcie_width_max)
        sheet = of_card(torch.cuda.get_device_name(self.device)) if self.on_gpu else None
        known = promised(sheet, link_gbps)
        self.figures = [replace(figure, datasheet=known.get(figure.name)) for figure in self.figures]
        found = self.ranks.all_values((self.figures, self.contention, self.warnings), "what was measured")
        of_ranks, groups, warnings = zip(*found, strict=True)
        self.figures, self.contention = slowest(of_ranks), most_contended(groups)
        best = self._best().values()
        counts = [figure in best for figure in self.figures]
        self.warnings = warnings_of_ranks(warnings)
        self.warnings += rank_warnings([list(itertools.compress(figures, counts)) for figures in of_ranks])

    def _device_alone(self) -> None:
        with self._stage("matrix products", _MATMUL_S) as budget_s:
            self._products.settle(time_share=min(1.0, self.effort.time))
            matmul = self._products.figure(budget_s=budget_s / 2)
            load(self._products.run, self.device, _LOADED_S)
            self.warnings += clock_warnings(matmul, gpu_facts(self.device))
            self.figures.append(matmul)
        with self._stage("device memory", _COPY_S) as budget_s:
            self.figures += copy_figures(self.device, self.effort.tensor_bytes, budget_s=budget_s)

    def _transfers(self) -> bool:
        sizes = self.effort.transfer_bytes
        transfers = Transfers(self.device, max(sizes))
        with pinned(*transfers.host, device=self.device) as accepted:
            for size in sizes:
                with self._stage("copies between host and device", _TRANSFERS_S / len(sizes)) as budget_s:
                    self.figures += transfers.figures(size, budget_s=budget_s)
            load(transfers.up, self.device, _LOADED_S)
            self.warnings += link_warnings(gpu_facts(self.device))
        return accepted

    def _host_alone(self, chunk: AdamChunk, *, torch_threads: int) -> None:
        """The host's memory, and its AdamW by number of threads."""
        with self._stage("host memory", _DRAM_S) as budget_s:
            dram = dram_figures(self.effort.tensor_bytes, budget_s=budget_s)
        by_threads = {
            count: self._on_host(_WHOLE, [chunk], partial(AdamChunk.update, threads=count), threads_of(count))
            for count in self._thread_counts
        }
        self.figures += [*dram, *by_threads.values()]
        of_ranks = self.ranks.all_values(list(by_threads.values()), "AdamW by number of threads")
        self._adam_threads = best_threads(dict(zip(by_threads, slowest(of_ranks), strict=True)))
        self.warnings += thread_warnings(
            by_threads,
            max(figure.median for figure in dram),
            torch_threads=torch_threads,
            cores=self.threads,
            beside_gpu=self.on_gpu,
        )

    def _host_adam(self, chunks: Sequence[AdamChunk], when: str) -> None:
        """The host's AdamW with the best number of threads, at one moment, over all ``chunks``.

        In steps on the host of a virtual machine some chunks took a third longer than others, always the same ones, and
        other users of such a host slow all chunks for seconds. A step updates tens of gigabytes.
        """
        threads, elements, bf16 = self._adam_threads, chunks[0].elements, torch.bfloat16
        self.figures.append(self._on_host(_WHOLE, chunks, partial(AdamChunk.update, threads=threads), when))
        weight = torch.empty_like(chunks[0].weight)
        make_weight = partial(AdamChunk.make_weight, new_weight=weight, threads=threads)
        self.figures.append(self._on_host(_WEIGHT, chunks, make_weight, when))
        moments = random_tensor(elements, bf16, CPU), random_tensor(elements, bf16, CPU, positive=True)
        update_narrow = partial(AdamChunk.update, threads=threads, moments=moments)
        self.figures.append(self._on_host(_NARROW, chunks, update_narrow, when))

    def _on_host(self, name: str, chunks: Sequence[AdamChunk], update: Callable[[AdamChunk], None], at: str) -> Figure:
        # In a step on a GPU the launching thread takes a core. On a CPU that thread does the updates itself.
        with self._stage("AdamW on the host", _ADAM_S) as budget_s, one_core_taken(wanted=self.on_gpu):
            return adam_figure(name, chunks, update, CPU, budget_s=budget_s, at=at)

    def _at_moments(self, name: str) -> list[Figure]:
        return [figure for figure in self.figures if figure.name == name and figure.at in _MOMENTS]

    def _optimizers_and_kernels(self) -> None:
        with self._stage("AdamW on the device", _ADAM_S) as budget_s:
            chunk = AdamChunk.on(self.device, self.effort.adam_elements)
            self.figures.append(adam_figure("device AdamW", [chunk], AdamChunk.update, self.device, budget_s=budget_s))
            del chunk
        if self.on_gpu:
            with self._stage("AdamW on the device, states on the host", _STREAMED_S) as budget_s:
                streamed = StreamedChunk(self.device, self.effort.adam_elements)
                with pinned(*streamed.chunk, device=self.device) as accepted:
                    if self._all_have(accepted):
                        self.figures.append(streamed.figure(budget_s=budget_s))
                del streamed
        for kernel in (flatten_figure, pack_figure):
            with self._stage("flatten and pack", _KERNEL_S) as budget_s:
                self.figures.append(kernel(self.device, self.effort.hidden, budget_s=budget_s))

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
                self.figures += collectives.figures(size, budget_s=budget_s)
        return collectives

    def _best(self) -> dict[str, Figure]:
        """The figure of each name that counts."""
        names = dict.fromkeys(figure.name for figure in self.figures)
        return {name: decisive([figure for figure in self.figures if figure.name == name]) for name in names}

    def profile(self, base: HardwareProfile) -> HardwareProfile:
        """``base`` with the rates that were found."""
        rates = {name: figure.median for name, figure in self._best().items()}
        for name in (_WHOLE, _WEIGHT, _NARROW):
            rates[name] = rate_over_time(self._at_moments(name))
        return replace(
            base,
            matmul_tflops=rates["matmul"],
            device_copy_gbps=rates["device copy"],
            h2d_gbps=rates["h2d"],
            d2h_gbps=rates["d2h"],
            bidirectional_gbps=rates["both ways"],
            host_dram_gbps=rates["host DRAM"],
            host_adam_gparams=rates[_WHOLE],
            device_adam_gparams=rates["device AdamW"],
            host_adam_threads=self._adam_threads,
            host_adam_weight_gparams=rates[_WEIGHT],
            host_adam_narrow_gparams=rates[_NARROW],
            host_adam_p20_gparams=statistics.harmonic_mean(each.p20 for each in self._at_moments(_WHOLE)),
            streamed_adam_gparams=rates.get("streamed AdamW"),
            flatten_gbps=rates["flatten"],
            pack_gbps=rates["pack"],
            all_gather_gbps=rates.get("all_gather"),
            all_to_all_gbps=rates.get("all_to_all"),
            contention=tuple(self.contention),
            figures=tuple(self.figures),
            warnings=tuple(self.warnings),
        )


def promised(sheet: Datasheet | None, link_gbps: float | None) -> dict[str, float]:
    """What makers promise of the figures with these names, in their units, as far as it is known.

    Args:
        sheet: of the card.
        link_gbps: what its link carries one way by its specification.
    """
    found: dict[str, float] = {}
    if sheet is not None:
        found |= {"matmul": sheet.matmul_tflops, "device AdamW": sheet.memory_gbps / ADAM_BYTES}
        found |= dict.fromkeys(("device copy", "flatten", "pack"), sheet.memory_gbps)
    if link_gbps is not None:
        found |= {"h2d": link_gbps, "d2h": link_gbps, "both ways": 2 * link_gbps}
        found["streamed AdamW"] = link_gbps / STREAMED_BYTES
    return found


def rate_over_time(moments: Sequence[Figure]) -> float:
    """The rate of a long run of work that was measured at several moments.

    In a step the host updates dozens of chunks, and the step takes as long as all of them together. Where a third of
    them take half as long again, as on a host with neighbours, the median does not show it.
    """
    return statistics.harmonic_mean(figure.long_run for figure in moments)


def decisive(figures: Sequence[Figure]) -> Figure:
    """The one of ``figures`` that counts: the best, or, by size, the best of the three largest, which no cache holds.

    Whatever else a machine does in between can only make it slower.
    """
    by_size = figures[0].name in _BY_SIZE
    return max(figures[-_LARGEST:] if by_size else figures, key=lambda figure: figure.median)
