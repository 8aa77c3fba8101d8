"""The answer to questions about a plan: what it takes, what limits it, what would change that, or why nothing fits.

Every way to ask shows this one object: ``protrain plan``, its --json and --compare, and ``optimizer.explain()``. All
numbers come from the models that the search uses. What a phase waits for is read from the simulated timeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

from protrain.common.errors import PlanError
from protrain.common.records import Record
from protrain.common.tables import WIDTH, aligned, format_bytes, format_change, format_ms, per_gpu, wrapped
from protrain.hardware.profile import HardwareProfile
from protrain.planning.fits import check
from protrain.planning.plan import Plan
from protrain.planning.predict import Models
from protrain.planning.ranges import Change, changes_of
from protrain.planning.rates import slower_share
from protrain.planning.search import search
from protrain.planning.timeline import HOST, WAITS, Phase, phases
from protrain.profiler.model_profile import ModelProfile

_SHOWN = 0.0005  # the smallest share that is printed as 0.1%
_SAME = 0.005  # speeds within this share count as the same, since the search has other criteria for plans so close


@dataclass(frozen=True, kw_only=True)
class Job(Record):
    """How much is to be trained, and what a GPU costs."""

    tokens: int = 10**9
    price: float | None = None  # of a GPU for an hour, in dollars

    def bill(self, tokens_per_s: float, n_gpus: int) -> str:
        """How long the job takes at this speed, and what it costs if the price is known, as text."""
        hours = self.tokens / tokens_per_s / 3600
        time = f"{hours / 24:.3g} days" if hours >= 48 else f"{hours:.3g} h"
        return time if self.price is None else f"{time}, ${hours * n_gpus * self.price:,.0f}"

    def __str__(self) -> str:
        """The tokens, as people write them: "1 B tokens"."""
        unit, name = next(pair for pair in ((10**9, "B"), (10**6, "M"), (1, "")) if self.tokens >= pair[0])
        return f"{self.tokens / unit:.4g} {name}".strip() + " tokens"


@dataclass(frozen=True, kw_only=True)
class Alternative(Record):
    """What could be done instead, as something that exists, and how fast that would be."""

    what: str
    plan: Plan | None  # None: it does not fit either


@dataclass(frozen=True, kw_only=True)
class Machine(Record):
    """The machine that a plan is made for. Bytes are those of one GPU and of its share of the host."""

    name: str
    gpus: int  # of all nodes together
    device_type: str  # "cuda" or "cpu"
    device_bytes: int
    host_bytes: int
    rates: str  # "measured", "composed" or "assumed"
    collectives: dict[str, str]  # of several GPUs: rates of what they exchange, and how each is known

    @classmethod
    def of(cls, hardware: HardwareProfile) -> Self:
        """The machine of a profile."""
        return cls(
            name=hardware.name,
            gpus=hardware.world_size,
            device_type=hardware.device_type,
            device_bytes=hardware.device_bytes,
            host_bytes=hardware.host_bytes,
            rates=hardware.rates,
            collectives=_collectives(hardware) if hardware.world_size > 1 else {},
        )

    def __str__(self) -> str:
        """The machine as the first line of an answer names it."""
        shards = f", {self.gpus} GPUs with 1/{self.gpus} of the states each" if self.gpus > 1 else ""
        host = f"{per_gpu('host memory', self.gpus)} {format_bytes(self.host_bytes)}"
        return f"{self.name}{shards}, {host}, rates {self.rates}"


def _collectives(hardware: HardwareProfile) -> dict[str, str]:
    """What each GPU receives in gathers and reductions, how fast it computes meanwhile, and how that is known."""
    said = {
        what: f"{rate_gbps or link_gbps:.3g} GB/s ({hardware.known(name)})"
        for what, name, rate_gbps, link_gbps in (
            ("gathers", "all_gather_gbps", hardware.all_gather_gbps, hardware.h2d_gbps),
            ("reductions", "all_to_all_gbps", hardware.all_to_all_gbps, hardware.d2h_gbps),
        )
    }
    if (kept := hardware.share("matmul", "collective")) < 1:
        known = "measured" if hardware.source == "measured" else "composed"
        said["computing beside them"] = f"{kept:.0%} ({known})"
    return said


@dataclass(frozen=True, kw_only=True)
class Answer(Record):
    """Whether a model fits a machine, how fast it would be there, what limits it, and what would change that.

    Without a plan there are no times and bytes, and the verdict says what is missing.
    """

    file_kind = "the answer to a question about a plan"

    fits: bool
    verdict: str  # one sentence
    lacks: str = ""  # the memory that is too small, if nothing fits
    lacks_bytes: int = 0  # how much of it each GPU, or its share of the host, would need beyond what there is
    fitting_batch: int = 0  # a smaller one that seems to fit; 0: none is known
    model: str  # its class
    parameters: int
    trained_parameters: int
    n_sequences: int  # of a batch, on each GPU
    accumulation: int  # batches of a step, on each GPU
    tokens_per_step: int  # on all GPUs together
    machine: Machine
    plan: Plan | None = None  # with new predictions for this profile and machine
    tokens_per_s: float | None = None  # on all GPUs together
    times_ms: dict[str, float] = field(default_factory=dict)  # of the step, also on a slower host, and of its phases
    device_bytes: dict[str, int] = field(default_factory=dict)  # the whole prediction, and its parts
    host_bytes: dict[str, int] = field(default_factory=dict)
    estimated: bool = False  # whether times are estimated from counted operations
    updates_in_backward: bool = False
    slower_share: float = 1.0  # of the host's calibrated rate, which plans are made for; 1 if it updates nothing
    large_buffers: int = 0  # beside the plan's n_buffer, for chunks of large parameters
    phases: tuple[Phase, ...] = ()  # of the step's last batch
    changes: tuple[Change, ...] = ()
    job: Job = Job()
    alternatives: tuple[Alternative, ...] = ()  # the nearest first

    @classmethod
    def refused(cls, why: PlanError, profile: ModelProfile, hardware: HardwareProfile) -> Self:
        """The answer where no plan fits."""
        return cls(
            fits=False,
            verdict=str(replace(why, remedy="")).strip(),  # which is in bytes, and none that can be bought
            lacks=f"{why.where} memory",
            lacks_bytes=why.needed_bytes - why.available_bytes,
            fitting_batch=why.fitting_batch,
            machine=Machine.of(hardware),
            **_model(profile, hardware),
        )

    def __str__(self) -> str:
        return self.table()

    @property
    def fitting(self) -> Plan:
        """The plan of a model that fits."""
        assert self.plan is not None, self.verdict
        return self.plan

    @property
    def speed(self) -> str:
        """The time of a step, and how many tokens a second that is, as text."""
        return f"{format_ms(self.fitting.step_ms)}, {self.fitting.tokens_per_s:,.0f} tokens/s"

    @property
    def token_price(self) -> float:
        """What a token costs if the price of a GPU is known, else how long it takes; infinite if nothing fits."""
        if self.tokens_per_s is None:
            return inf
        return (1.0 if self.job.price is None else self.machine.gpus * self.job.price) / self.tokens_per_s

    @property
    def limits(self) -> dict[str, float]:
        """By critical resource, the share of the step that it limits, the largest first."""
        whole_ms, found = sum(phase.length_ms for phase in self.phases), dict[str, float]()
        for phase in self.phases:
            found[phase.limit] = found.get(phase.limit, 0.0) + phase.length_ms / whole_ms
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def table(self) -> str:
        """Everything as text."""
        if self.plan is None:
            return wrapped(self.verdict)
        tables = [self.memory_table(), self.phase_table(), self.knob_table(), self.alternatives_table()]
        step = "; ".join(filter(None, (f"{self.plan}: {self.speed}", self.on_slower_host())))
        return "\n\n".join(filter(None, (wrapped(step, indent="  "), *tables)))

    def on_slower_host(self) -> str:
        """The step time on the slower host that plans are made for, as text; "" if no host is slower or has work."""
        if self.slower_share >= 0.995:  # the host is slower by less than what is printed as 1%
            return ""
        return f"{format_ms(self.slower_ms)} should the host update {1 - self.slower_share:.0%} more slowly"

    @property
    def slower_ms(self) -> float:
        """The step time on the slower host that plans are made for."""
        return self.times_ms["step on a slower host"]

    def memory_table(self) -> str:
        """Device and host memory by part."""
        rows = []
        for name, limit, parts in (
            ("device memory", self.machine.device_bytes, self.device_bytes),
            ("host memory", self.machine.host_bytes, self.host_bytes),
        ):
            rows.append([per_gpu(name, self.machine.gpus), format_bytes(parts["all"]), f"of {format_bytes(limit)}"])
            rows += [[f"  {part}", format_bytes(size)] for part, size in parts.items() if part != "all"]
        return aligned(rows)

    def phase_table(self) -> str:
        """The phases, and what each of them waits for."""
        known = [name for name in WAITS.values() if all(name in phase.waits_ms for phase in self.phases)]
        waits = [name for name in known if any(phase.waits_ms[name] > 0 for phase in self.phases)]
        columns = [["phase", "time", "computing", *(f"waiting for {name}" for name in waits), "limited by"]]
        for phase in self.phases:
            parts = [phase.compute_ms, *(phase.waits_ms[name] for name in waits)]
            shares = [f"{part / phase.length_ms:.0%}" if phase.length_ms else "-" for part in parts]
            columns.append([phase.name, format_ms(phase.length_ms), *shares, phase.limit])
        return aligned(list(zip(*columns, strict=True)))

    def knob_table(self) -> str:
        """The effect of each knob, one more and one less."""
        plan = self.fitting
        slower = [f"host {1 - self.slower_share:.0%} slower"] if self.on_slower_host() else []
        rows = [["one more or less", "step time", *slower, "device", "host", ""]]
        for change in self.changes:
            at = int(getattr(plan, change.knob))
            if at + change.step < 0:
                continue
            name = f"{change.knob} {at} -> {at + change.step}"
            if change.impossible:
                rows.append([name, "-", *["-"] * len(slower), "-", "-", change.impossible])
                continue
            over = [
                f"{format_bytes(size - limit)} too much {where} memory"
                for where, size, limit in (
                    ("device", change.device_bytes, self.machine.device_bytes),
                    ("host", change.host_bytes, self.machine.host_bytes),
                )
                if size > limit
            ]
            rows.append(
                [
                    name,
                    f"{format_ms(change.step_ms)} ({format_change(change.step_ms, plan.step_ms)})",
                    *[format_change(change.slower_ms, self.slower_ms)] * len(slower),
                    _signed(change.device_bytes - plan.device_bytes),
                    _signed(change.host_bytes - plan.host_bytes),
                    f"infeasible: {', '.join(over)}" if over else self._not_taken(change),
                ]
            )
        return aligned(rows, WIDTH)

    def _not_taken(self, change: Change) -> str:
        """Why the search does not make ``change`` although it saves time, else ""."""
        saved = 1 - change.slower_ms / self.slower_ms
        if saved >= _SHOWN:
            return f"saves {saved:.1%} on a slower host, less than is asked of it"
        is_faster = 1 - change.step_ms / self.fitting.step_ms >= _SHOWN
        return "saves nothing on the slower host that plans are made for" if is_faster else ""

    def nearest(self) -> str:
        """The alternative that would fit, as a sentence."""
        for other in self.alternatives:
            if other.plan is not None:
                return f"The nearest that fits: {other.what}, {other.plan.tokens_per_s:,.0f} tokens/s."
        return "Nothing that was tried instead fits."

    def alternatives_table(self) -> str:
        """What would fit or be faster, each with its speed; "" if nothing else was tried."""
        rows = [["instead", "tokens/s", str(self.job), ""]]
        for other in self.alternatives:
            if other.plan is None:
                rows.append([other.what, "-", "-", "does not fit"])
                continue
            speed = other.plan.tokens_per_s
            change = "no faster"
            if self.tokens_per_s is None:
                change = "fits"
            elif speed > self.tokens_per_s * (1 + _SAME):
                change = format_change(speed, self.tokens_per_s)
            rows.append([other.what, f"{speed:,.0f}", self.job.bill(speed, other.plan.world_size), change])
        return aligned(rows, WIDTH) if self.alternatives else ""


def explain(plan: Plan, profile: ModelProfile, hardware: HardwareProfile) -> Answer:
    """What limits ``plan`` for ``profile`` on ``hardware``, and what each of its numbers would change.

    Raises:
        ValueError: the plan was made for another model, or contradicts itself.
        PlanError: it does not fit ``hardware``.
    """
    plan = check(plan, profile, hardware)
    models = Models.of(plan, profile, hardware)
    modes, counts = plan.block_modes, plan.counts
    machine, timeline = Machine.of(hardware), models.timeline(modes, counts)
    parts, host_works = phases(timeline), any(operation.lane == HOST for operation in timeline.operations)
    return Answer(
        fits=True,
        verdict=f"fits on {machine}",
        **_model(profile, hardware),
        machine=machine,
        plan=plan,
        tokens_per_s=plan.tokens_per_s,
        times_ms={
            "step": plan.step_ms,
            # An operation that takes longer may change the order of others for the better, which nobody should expect.
            "step on a slower host": max(plan.step_ms, models.slower_ms(modes, counts)),
            **{phase.name: phase.length_ms for phase in parts},
        },
        device_bytes={"all": plan.device_bytes, **models.memory.device_parts(counts, modes)},
        host_bytes={"all": plan.host_bytes, **models.memory.host_parts(counts, modes)},
        estimated=profile.device != hardware.device_type,
        updates_in_backward=profile.step_during_backward,
        slower_share=slower_share(hardware) if host_works else 1.0,
        large_buffers=models.memory.large_buffers[plan.n_persist],
        phases=parts,
        changes=tuple(changes_of(plan, profile, models)),
    )


def _model(profile: ModelProfile, hardware: HardwareProfile) -> dict[str, Any]:
    """The fields of an answer on the model."""
    return {
        "model": profile.model,
        "parameters": profile.n_parameters,
        "trained_parameters": profile.n_trainable,
        "n_sequences": profile.n_sequences,
        "accumulation": profile.accumulation,
        "tokens_per_step": profile.tokens * profile.accumulation * hardware.world_size,
    }


def alternatives(
    profile: ModelProfile, hardware: HardwareProfile, machines: Mapping[str, HardwareProfile]
) -> tuple[Alternative, ...]:
    """The fastest plans for the same batch, with moments of 16 bits and on ``machines``, by what these are called.

    The times that a profile has were measured on its own card. On another card they are estimated from its operations.
    """
    narrow, estimated = replace(profile, moment_dtype="bfloat16"), replace(profile, device="meta")
    cases = {"bf16 moments": (narrow, hardware)}
    for what, machine in machines.items():
        cases[what] = profile if machine.name == hardware.name else estimated, machine
    found = dict.fromkeys(cases)
    for what, case in cases.items():
        with suppress(PlanError):
            found[what] = search(*case)
    return tuple(Alternative(what=what, plan=plan) for what, plan in found.items())


def _signed(size: int) -> str:
    return "the same" if size == 0 else f"{'+' if size > 0 else '-'}{format_bytes(abs(size))}"
