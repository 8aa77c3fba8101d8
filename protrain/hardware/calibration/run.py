"""``calibrate``: measure everything that the planner needs to know of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from protrain.distributed.devices import own_device, refuse_shared_gpu
from protrain.distributed.joining import join, local_rank
from protrain.distributed.ranks import Ranks
from protrain.hardware.cache import Machine, store
from protrain.hardware.calibration.activities import (
    CPU,
    LAUNCHING,
    Activity,
    AdamChunk,
    Collectives,
    Work,
    pinned,
)
from protrain.hardware.calibration.contention import (
    Group,
    Runs,
    groups_of,
    most_contended,
    rates_of,
    rates_on_ranks,
    rates_together,
    shares_of,
    slowest,
)
from protrain.hardware.calibration.report import (
    NOT_PINNED,
    card_warnings,
    machine_warnings,
    warnings_of_all,
)
from protrain.hardware.calibration.timing import FULL_SECONDS, Effort
from protrain.hardware.detection import assume
from protrain.hardware.memory import update_threads, usable_cores
from protrain.hardware.nvml import GpuFacts, gpu_facts
from protrain.hardware.profile import HardwareProfile

Progress = Callable[[str, float], object]
_LOADED_S = 0.6  # of products and copies, during which the card is asked for its clocks and its link
_ROUNDS = 2  # over all groups
# Seconds in a calibration of FULL_SECONDS: of a number of threads, of a group in all rounds, of one whose rates vary
# because the host updates in it, and of the two activities on which plans depend most.
_THREADS_S, _GROUP_S, _HOST_GROUP_S, _LONG_S = 1.0, 0.5, 0.9, 2.0
_GAIN = 1.03  # of the host's AdamW, for which it takes one core more from others
_LONG = ("matmul",), ("host_adam",)
_OPTIONAL = "streamed_adam_gparams", "all_gather_gbps", "all_to_all_gbps"  # not measured on every machine


def calibrate(
    device: torch.device | str | None = None,
    *,
    seconds: float = FULL_SECONDS,
    save: bool = True,
    progress: Progress | None = None,
) -> HardwareProfile:
    """Measure ``device`` and its host. Later calls that detect the machine use what was measured.

    A full calibration takes less than a minute, up to 5 GiB of the device's memory and 16 GiB of the host's. The
    machine should be idle. Under torchrun every process calls this function, which joins or starts the process group as
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
        cores = max(1, usable_cores() // ranks.on_node)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(cores)
        effort = Effort(
            seconds=seconds,
            host_room_bytes=base.host_bytes // ranks.on_node,
            device_room_bytes=base.device_bytes,
        )
        warnings = machine_warnings(effort, names)
        measured = Calibration(target, effort, ranks, cores=cores, progress=progress).run(warnings)
        profile = replace(base, source="measured", composed=(), **vars(machine), **measured)
        # One process of every host stores it, as hosts may not share a home, and one for each kind of GPU there.
        if save and machine.name not in names[ranks.rank - local_rank() : ranks.rank]:
            store(profile, machine)
        ranks.all_values(None, "the end of the calibration")  # a rank that looks for the profile now will find it
    return profile


class Calibration:
    """One run over everything, a stage at a time."""

    def __init__(
        self, device: torch.device, effort: Effort, ranks: Ranks, *, cores: int, progress: Progress | None
    ) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._effort = effort
        self._ranks = ranks
        self._cores = cores
        self._progress = progress or (lambda _what, _done: None)

    def _rates(
        self, what: str, activities: Mapping[str, Activity], full_s: float, *, done: float = 0.0
    ) -> dict[str, list[float]]:
        """The rates of ``activities`` together, in a stage that takes ``full_s`` in a full calibration.

        ``done`` is the share of the work that is done before.
        """
        self._progress(what, done)
        # On a CPU the thread that launches does the updates itself. The bandwidth of the host's memory is measured with
        # all cores.
        beside = {"launching": LAUNCHING} if self._on_gpu and "dram" not in activities else {}
        duration_s = full_s * self._effort.time
        found = rates_on_ranks(
            self._ranks, {**activities, **beside}, f"the calibration of {what}", duration_s=duration_s
        )
        return {name: found[name] for name in activities}

    def run(self, warnings: list[str]) -> dict[str, Any]:
        """The results by field of the profile. ``warnings`` are among them, followed by those that measuring adds."""
        effort, ranks = self._effort, self._ranks
        chunks = [AdamChunk.on(CPU, effort.adam_elements) for _ in range(effort.host_chunks)]
        threads = self._threads(chunks[0])
        work = Work(self._device, effort, chunks, threads=threads)
        if ranks.several:
            ranks.use(self._device)
            work.activities |= Collectives(ranks, self._device, effort.tensor_bytes // 4).activities()
        with pinned(*work.pinned, device=self._device) as accepted:
            warnings = [*warnings, *self._card_warnings(work.activities), *([] if accepted else [NOT_PINNED])]
            if not all(ranks.all_values(accepted, "whether memory can be pinned")):
                del work.activities["streamed_adam"]
            runs = self._runs(work.activities)
        found = ranks.all_values((rates_of(runs), shares_of(runs), warnings), "what was measured")
        of_ranks, groups, lines = zip(*found, strict=True)
        self._progress("done", 1.0)
        return {
            **dict.fromkeys(_OPTIONAL),
            **slowest(of_ranks),
            "host_adam_threads": threads,
            "contention": tuple(most_contended(groups)),
            "warnings": tuple(warnings_of_all(lines)),
        }

    def _threads(self, chunk: AdamChunk) -> int:
        """The threads of the host's AdamW: beside a GPU as many as usual, or one more where that gains on all ranks.

        One of these two was the best number of threads in every calibration of a GPU under ``bench/results``, of which
        the earlier ones tried all numbers.
        """
        usual = update_threads(self._cores, beside_gpu=self._on_gpu)
        if not self._on_gpu:
            return usual
        rates = []
        for count in (usual, usual + 1):
            update = Activity(partial(chunk.update, count), chunk.weight.numel() / 1e9)
            found = self._rates(f"AdamW on the host, threads: {count}", {"host_adam": update}, _THREADS_S)
            rates.append(median(found["host_adam"]))
        of_ranks = self._ranks.all_values(rates, "AdamW by number of threads")
        return usual + 1 if all(more > _GAIN * less for less, more in of_ranks) else usual

    def _card_warnings(self, activities: Mapping[str, Activity]) -> list[str]:
        """Warns of the card, which is asked while it computes and copies, and gets warm by that as well."""
        if not self._on_gpu:
            return []
        facts: list[GpuFacts | None] = []
        asking = Activity(lambda: facts.append(gpu_facts(self._device)), 1.0)
        load = {name: activities[name] for name in ("matmul", "h2d")}
        rates_together({**load, "asking": asking}, duration_s=_LOADED_S)
        torch.cuda.synchronize(self._device)  # nothing of that may run beside what is measured next
        return card_warnings(facts[-1])

    def _runs(self, activities: Mapping[str, Activity]) -> Runs:
        """The rates of all groups, in several rounds."""
        runs: dict[Group, list[dict[str, list[float]]]] = {}
        groups = groups_of([*activities]) * _ROUNDS
        for at, group in enumerate(groups):
            of_host = any(name.startswith("host_adam") for name in group)
            full_s = (_LONG_S if group in _LONG else _HOST_GROUP_S if of_host else _GROUP_S) / _ROUNDS
            together = {name: activities[name] for name in group}
            found = self._rates(" + ".join(group), together, full_s, done=at / len(groups))
            runs.setdefault(group, []).append(found)
        return runs
