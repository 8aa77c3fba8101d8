"""Rows of the comparison: a client with ProTrain beside itself without it."""

from __future__ import annotations

from dataclasses import dataclass

from bench.train.results import GIB, Outcome
from bench.train.task import Task
from protrain.common.records import Record
from protrain.common.tables import aligned, wrapped

_WIDTH = 100
_LEAST_LOSS = 1e-9  # that anything is divided by


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One client, trained in both ways."""

    client: str
    plain: Outcome
    protrain: Outcome
    lines: tuple[str, ...]  # that a user adds or changes
    sequences: int = 1  # of a row of the batch that pass through the trained model

    @property
    def ratio(self) -> float | None:
        """How many steps with ProTrain go into one without it; None where one of both has failed."""
        if self.plain.error or self.protrain.error:
            return None
        return self.plain.median_ms / self.protrain.median_ms

    @property
    def loss_difference(self) -> float | None:
        """The largest of all steps, relative to the loss without ProTrain; None where one of both has failed."""
        if self.plain.error or self.protrain.error:
            return None
        pairs = zip(self.plain.losses, self.protrain.losses, strict=True)
        return max(abs(ours - plain) / max(abs(plain), _LEAST_LOSS) for plain, ours in pairs)

    def cells(self, task: Task) -> list[list[str]]:
        """Two lines of the table: one without and one with ProTrain."""
        found: list[list[str]] = []
        for way, outcome in (("plain", self.plain), ("ProTrain", self.protrain)):
            line = ["" if found else self.client, way]
            if outcome.error:
                line.append("skipped" if outcome.error.startswith("skipped") else "failed")
            else:
                times = [f"{outcome.quantile_ms(share):.1f}" for share in (0.2, 0.8)]
                tokens = self.sequences * task.tokens_per_step / outcome.median_ms * 1e3
                peak = outcome.device_allocated_bytes or outcome.host_resident_bytes
                line += [f"{outcome.median_ms:.1f} ({times[0]} to {times[1]})", f"{tokens:,.0f}", f"{peak / GIB:.2f}"]
            found.append(line)
        if self.ratio is not None and self.loss_difference is not None:
            found[1] += [f"{self.ratio:.3f}", f"{self.loss_difference:.1e}", str(len(self.lines))]
        return found

    def remarks(self) -> list[str]:
        """Why there are no figures, and whether a plan keeps less on the GPU than the plain client does."""
        ways = (("plain", self.plain), ("ProTrain", self.protrain))
        found = [f"{self.client}, {way}: {outcome.failure}" for way, outcome in ways if outcome.error]
        plan = self.protrain.plan
        if plan is not None and (plan.n_persist < plan.n_chunks or plan.n_swap or plan.n_ckpt):
            found.append(f"{self.client}: ProTrain's plan does not keep all on the device: {plan}")
        return found


@dataclass(frozen=True, kw_only=True)
class Clients(Record):
    """A whole run: one machine, one task, every client."""

    command: str
    driver: str
    commit: str
    versions: dict[str, str]
    task: Task
    rows_of_clients: tuple[Row, ...]

    def table(self) -> str:
        """For people, at most 100 columns wide."""
        done = [one for row in self.rows_of_clients for one in (row.plain, row.protrain) if not one.error]
        several = f"{self.task.gpus} x " if self.task.gpus > 1 else ""
        where = f"{done[0].parameters / 1e9:.3f} B parameters, {several}{done[0].device}" if done else "nobody trained"
        tokens = self.task.tokens_per_step
        title = f"{self.task.label}: {where}, {tokens:,} tokens a step, or {2 * tokens:,} (dpo, sentences)"
        peak = "GiB" if any(one.device_allocated_bytes for one in done) else "host GiB"
        head = ["client", "", "ms/step (p20 to p80)", "tokens/s", peak, "plain/ProTrain", "loss within", "lines"]
        cells = [line for row in self.rows_of_clients for line in row.cells(self.task)]
        remarks = [wrapped(text, _WIDTH, "  ") for row in self.rows_of_clients for text in row.remarks()]
        return "\n".join([wrapped(title, _WIDTH), "", aligned([head, *cells]), *([""] if remarks else []), *remarks])
