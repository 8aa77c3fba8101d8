"""Rows of the comparison, and what they say beside each other."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.train.contestants import KINDS, Contestant
from bench.train.task import Task
from protrain.common.records import Record
from protrain.common.tables import aligned
from protrain.planning import Plan

GIB = 1024**3
UNFINISHED = "not done"  # what a contestant leaves that is ended from outside


@dataclass(frozen=True, kw_only=True)
class Outcome(Record):
    """What one contestant did, or why it did not.

    With several GPUs times, losses and host threads are those of the first rank, on its own batches, and the peaks of
    processes and GPUs are the largest of all ranks.
    """

    contestant: Contestant
    error: str = ""  # a reason in place of figures
    step_ms: tuple[float, ...] = ()  # of every timed step, in order
    parameters: int = 0
    first_loss: float = 0.0  # of the first timed step
    last_loss: float = 0.0
    losses: tuple[float, ...] = ()  # of every step, those before the timed ones included: contestants' are about alike
    gradient_norms: tuple[float, ...] = ()  # likewise, where there is clipping
    device: str = ""  # what it ran on
    clipped_steps: int = 0  # timed steps whose gradient norm was above the limit
    setup_s: float = 0.0  # until the first step: weights, planning, states
    first_step_s: float = 0.0  # until the first step was done, compilation included; 0: it is not known
    device_allocated_bytes: int = 0  # peak of tensors in all steps
    device_reserved_bytes: int = 0  # peak of the caching allocator
    device_other_bytes: int = 0  # of the GPU beside the allocator: CUDA's context, kernels, NCCL's buffers
    host_resident_bytes: int = 0  # peak of the process
    host_pinned_bytes: int = 0  # of that
    host_used_bytes: int = 0  # by how much the machine's available memory fell at most, whoever took it
    host_available_bytes: int = 0  # of the machine, when the worker started; 0: none was started
    config: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None  # ProTrain's

    @property
    def failure(self) -> str:
        """The error, with steps done and memory taken by then as far as they are known; "" when there is none."""
        if not self.error:
            return ""
        memory, steps = [], ""
        if self.setup_s:
            steps = f" [at least {len(self.losses)} steps done, ready after {self.setup_s:.0f} s]"
        if self.host_available_bytes:
            memory.append(f"host {self.host_used_bytes / GIB:.1f} of {self.host_available_bytes / GIB:.1f} GiB")
        if self.device_reserved_bytes:
            memory.append(f"GPU {self.device_reserved_bytes / GIB:.1f} GiB")
        return self.error + steps + (f" [memory taken: {', '.join(memory)}]" if memory else "")

    @property
    def median_ms(self) -> float:
        """Of the timed steps."""
        return statistics.median(self.step_ms)

    def quantile_ms(self, share: float) -> float:
        """The time that ``share`` of the timed steps stay within, between neighbours in proportion."""
        return float(np.quantile(self.step_ms, share))


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """A whole run: one machine, one task, every contestant."""

    command: str
    driver: str
    commit: str
    versions: dict[str, str]
    dtype: str
    task: Task
    outcomes: tuple[Outcome, ...]

    @property
    def device(self) -> str:
        """The GPU, or the processor; "" when nobody ran."""
        return next((outcome.device for outcome in self.outcomes if outcome.device), "")

    def speedups(self, own: Outcome) -> dict[str, float]:
        """By the name of each other contestant that ran: how many of ``own``'s steps go into one of its steps.

        Of the floor it is the share of the attainable that ``own`` reaches.
        """
        return {
            other.contestant.name: other.median_ms / own.median_ms
            for other in self.outcomes
            if not other.error and other is not own
        }

    def own_rows(self) -> list[Outcome]:
        """ProTrain's rows that ran, without those of its clients."""
        return [one for one in self.outcomes if one.contestant.kind == "protrain" and not one.error]

    def gain(self, outcome: Outcome) -> float | None:
        """How many steps of a client on ProTrain go into one of the plain client; None where those did not both run."""
        plain = replace(outcome.contestant, plain=True)
        ran = [one for one in self.outcomes if one.contestant == plain and one is not outcome and not one.error]
        return ran[0].median_ms / outcome.median_ms if ran else None

    def tokens_per_s(self, outcome: Outcome) -> float:
        """Of the median step, on all GPUs together."""
        sequences = KINDS[outcome.contestant.kind].sequences
        return sequences * self.task.tokens_per_step / outcome.median_ms * 1e3

    def tflops(self, outcome: Outcome) -> float:
        """Of one GPU: what the model needs, without recomputation and attention scores.

        For each parameter and token 6 operations, and 4 with an adapter, as frozen weights have no gradient.
        """
        return self._per_parameter * outcome.parameters * self.tokens_per_s(outcome) / self.task.gpus / 1e12

    @property
    def _per_parameter(self) -> int:
        return 6 if self.task.lora is None else 4

    def table(self) -> str:
        """The comparison for people; one line per contestant, and a reason where there are no figures."""
        own, several = self.own_rows(), self.task.gpus > 1
        has_clients = any(KINDS[one.contestant.kind].is_client for one in self.outcomes)
        head = [
            "",
            "ms/step (p20 to p80)",
            "tokens/s",
            *(["tokens/s a GPU"] if several else []),
            f"{self._per_parameter}NT TFLOP/s{' a GPU' if several else ''}",
            "GPU GiB (reserved)",
            "host GiB",
            "first step after, s",
            "clipped",
            "last loss of rank 0" if several else "last loss",
            *(["plain/ProTrain"] if has_clients else []),
        ]
        rows = [[*head, *(f"{one.contestant.name} is faster" for one in own)]]
        plans, failed = [], []
        for outcome in self.outcomes:
            if outcome.error:
                failed.append(f"{outcome.contestant.name}: {outcome.failure}")
                continue
            ratios = [self.speedups(one).get(outcome.contestant.name) for one in own]
            gain = self.gain(outcome)
            if outcome.plan is not None:
                plans.append(f"{outcome.contestant.name}: {outcome.plan}")
            rows.append(
                [
                    outcome.contestant.title,
                    f"{outcome.median_ms:.1f} ({outcome.quantile_ms(0.2):.1f} to {outcome.quantile_ms(0.8):.1f})",
                    f"{self.tokens_per_s(outcome):,.0f}",
                    *([f"{self.tokens_per_s(outcome) / self.task.gpus:,.0f}"] if several else []),
                    f"{self.tflops(outcome):.3g}",
                    f"{outcome.device_allocated_bytes / GIB:.1f} ({outcome.device_reserved_bytes / GIB:.1f})",
                    f"{max(outcome.host_used_bytes, outcome.host_resident_bytes) / GIB:.1f}",
                    f"{outcome.first_step_s:.1f}" if outcome.first_step_s else "-",
                    f"{outcome.clipped_steps}/{len(outcome.step_ms)}" if outcome.gradient_norms else "-",
                    f"{outcome.last_loss:.4f}" if outcome.contestant.kind != "floor" else "-",  # it trains nothing
                    *(["" if gain is None else f"{gain:.3f}"] if has_clients else []),
                    *("" if ratio is None else f"{ratio:.2f} times" for ratio in ratios),
                ]
            )
        return "\n".join([self.headline(), "", aligned(rows), "", *plans, *failed]).rstrip()

    def headline(self) -> str:
        """What was trained, and where."""
        sizes = {outcome.parameters for outcome in self.outcomes if outcome.parameters}
        size = f"{max(sizes) / 1e9:.2f} B parameters, " if sizes else ""
        loss = "chunked loss" if self.task.chunked_loss else "whole logits"
        several = f"{self.task.gpus} x " if self.task.gpus > 1 else ""
        size += "" if self.task.lora is None else f"an adapter ({self.task.lora}) trained, "
        size += "" if self.task.quantised is None else f"{self.task.quantised} base, "
        size += "float8 products, " if self.task.float8 else ""
        return (
            f"{self.task.label}: {size}{self.task.tokens_per_step:,} tokens a step, {self.dtype}, {loss}, clipping to "
            f"{self.task.clip_norm:g}, {several}{self.device}"
        )
