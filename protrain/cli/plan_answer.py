"""What `protrain plan --json` prints: the verdict, times and bytes for programs, and the machine that is assumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from protrain.common.errors import PlanError
from protrain.common.records import Record
from protrain.common.tables import format_bytes, per_gpu
from protrain.hardware.profile import HardwareProfile
from protrain.planning import Explanation, Plan
from protrain.profiler.model_profile import ModelProfile


@dataclass(frozen=True, kw_only=True)
class Machine(Record):
    """The machine that a plan is made for. Bytes are those of one GPU and of its share of the host."""

    name: str
    gpus: int  # of all nodes together
    device_bytes: int
    host_bytes: int
    rates: str  # "measured", "composed" or "assumed"

    @classmethod
    def of(cls, hardware: HardwareProfile) -> Self:
        """The machine of a profile."""
        return cls(
            name=hardware.name,
            gpus=hardware.world_size,
            device_bytes=hardware.device_bytes,
            host_bytes=hardware.host_bytes,
            rates=hardware.rates,
        )

    def __str__(self) -> str:
        """The machine as the first line of an answer names it."""
        shards = f", {self.gpus} of them with 1/{self.gpus} of the states each" if self.gpus > 1 else ""
        host = f"{per_gpu('host memory', self.gpus)} {format_bytes(self.host_bytes)}"
        return f"{self.name}{shards}, {host}, rates {self.rates}"


@dataclass(frozen=True, kw_only=True)
class Answer(Record):
    """Whether a model fits a machine, and how fast it would be there. Without a plan there are no times and bytes."""

    fits: bool
    verdict: str  # one sentence
    model: str | None = None  # its class; it and the next three are None where the batch alone is too large
    parameters: int | None = None
    trained_parameters: int | None = None
    tokens_per_step: int | None = None  # on all GPUs together
    machine: Machine
    tokens_per_s: float | None = None  # on all GPUs together
    times_ms: dict[str, float] | None = None  # of the step, also on a slower host, and of its last batch's phases
    device_bytes: dict[str, int] | None = None  # the whole prediction, and its parts
    host_bytes: dict[str, int] | None = None
    plan: Plan | None = None

    @classmethod
    def of(cls, profile: ModelProfile, hardware: HardwareProfile, found: Explanation | PlanError) -> Self:
        """The answer for ``profile`` on ``hardware``, for which a plan was explained or does not exist."""
        machine = Machine.of(hardware)
        about: dict[str, Any] = {
            "model": profile.model,
            "parameters": profile.n_parameters,
            "trained_parameters": profile.n_trainable,
            "tokens_per_step": profile.tokens * profile.accumulation * hardware.world_size,
            "machine": machine,
        }
        if isinstance(found, PlanError):
            return cls(fits=False, verdict=str(found), **about)
        plan = found.plan
        phases = {phase.name: phase.length_ms for phase in found.phases}
        return cls(
            fits=True,
            verdict=f"fits on {machine}",
            **about,
            tokens_per_s=plan.tokens_per_s,
            times_ms={"step": plan.step_ms, "step on a slower host": found.slower_ms, **phases},
            device_bytes={"all": plan.device_bytes, **found.device_parts},
            host_bytes={"all": plan.host_bytes, **found.host_parts},
            plan=plan,
        )
