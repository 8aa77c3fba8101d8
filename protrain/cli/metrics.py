"""Reports on a run: a live line, metrics.jsonl, a loss curve, and the times of steps."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch

from protrain.cli.loggers import Log
from protrain.cli.run_files import CURVE_FILE, METRICS_FILE
from protrain.common.progress import is_terminal, say, say_in_place
from protrain.common.tables import WIDTH

_WARMING_UP_STEPS = 5  # in a run
_RECENT_ROWS = 10  # whose median speed is shown


@dataclass(frozen=True)
class StepResult:
    """The numbers of a finished step, read by the host."""

    step: int  # the first step is 1
    losses: tuple[float, ...]  # the parts of the loss that the micro-batches of this rank bring
    gradient_norm: float | None
    ended_s: float  # on a clock of which only differences mean anything


class DelayedRead:
    """Reads a step's losses while the next step runs, so that the GPU never waits for the host.

    On a GPU the numbers are copied to pinned memory after the step, and ``take`` waits only for that copy. On a CPU
    they are there at once.

    Args:
        device: where the numbers are.
        losses: how many a step has.
    """

    def __init__(self, device: torch.device, losses: int) -> None:
        self._cuda = device.type == "cuda"
        self._hosts = [torch.empty(losses + 1, pin_memory=self._cuda) for _ in range(2)]
        self._pending: tuple[int, torch.Tensor, torch.cuda.Event | float, bool] | None = None
        self._last_event: torch.cuda.Event | None = None
        self._clock_s = 0.0

    def put(self, step: int, losses: Sequence[torch.Tensor], gradient_norm: torch.Tensor | None) -> None:
        """Queue the numbers of ``step``. Those of the step before must have been taken."""
        assert self._pending is None
        host = self._hosts[step % 2]
        host[:-1].copy_(torch.stack([loss.float() for loss in losses]), non_blocking=True)
        if gradient_norm is not None:
            host[-1].copy_(gradient_norm, non_blocking=True)
        end: torch.cuda.Event | float = time.perf_counter()
        if self._cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        self._pending = (step, host, end, gradient_norm is not None)

    def take(self) -> StepResult | None:
        """Wait for the queued step and return its numbers, or None if nothing is queued."""
        if self._pending is None:
            return None
        step, host, end, has_norm = self._pending
        self._pending = None
        if isinstance(end, float):
            self._clock_s = end
        else:
            end.synchronize()
            if self._last_event is not None:
                self._clock_s += self._last_event.elapsed_time(end) / 1000
            self._last_event = end
        *losses, norm = host.tolist()
        return StepResult(step, tuple(losses), norm if has_norm else None, self._clock_s)


def added_in_order(by_rank: Sequence[Sequence[float]]) -> float:
    """The fp32 sum of what micro-batches bring, in their order, where micro-batch i is on rank i mod W.

    It has the same bits for every W, as floats here are fp32 values.
    """
    total = torch.zeros(())
    for parts in zip(*by_rank, strict=True):
        for part in parts:
            total += part
    return float(total)


class StepTimes:
    """Times steps from the end of one step to the end of the next. What happens in pauses is left out.

    A step that stands alone between two saves or evaluations follows no other step's end. It is timed from its begin
    until its updates are done. These updates overlap with no other step, so its time is longer than that of a step
    among others. Such times count only if there are no others.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._begun_s: float | None = None  # the begin of the step after a pause

    def add(self, ended_s: float) -> float | None:
        """Note the end of a step. Returns its duration in ms, or None for the first step after a pause."""
        duration_ms = None if self._last_s is None else (ended_s - self._last_s) * 1000
        self._last_s = ended_s
        return duration_ms

    def pause(self) -> None:
        """Forget the end of the last step, because evaluation or saving follows."""
        self._last_s = self._begun_s = None

    def go_on(self, begun_s: float) -> None:
        """Note the end of a pause. Times here and in ``alone_ms`` are those of the host's clock."""
        self._begun_s = begun_s

    @property
    def is_alone(self) -> bool:
        """Whether a step that ends before a pause stands alone, because it also began after one."""
        return self._last_s is None and self._begun_s is not None

    def alone_ms(self, ended_s: float) -> float:
        """The duration of a step that stands alone, whose updates ended at ``ended_s``."""
        assert self._begun_s is not None
        return (ended_s - self._begun_s) * 1000


def quantile(durations_ms: Sequence[float], share: float) -> float | None:
    """The duration that ``share`` of the steps stay under, or None if there are none.

    The first steps are left out if there are more, because allocators grow and caches fill in them.
    """
    ordered = sorted(durations_ms[_WARMING_UP_STEPS:] or durations_ms)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


class MetricsFile:
    """The file metrics.jsonl, with one line per step, which is written as soon as the step is reported.

    Each line also goes to ``log``, if that is given.
    """

    def __init__(self, folder: Path, *, resumed_step: int, log: Log | None = None) -> None:
        self._path = folder / METRICS_FILE
        self._resumed_step = resumed_step
        self._log = log
        self.rows: list[dict[str, Any]] = []
        if resumed_step and self._path.exists():
            self.rows = [row for row in _read_rows(self._path) if row["step"] <= resumed_step]
        self._has_others = True  # whether the file may hold other rows than these

    def add(self, row: dict[str, Any]) -> None:
        """Append ``row``, which names its step. It replaces the last row if that is about the same step."""
        if self.rows and (self.rows[-1]["step"], self.rows[-1].keys()) == (row["step"], row.keys()):
            self.rows.pop()  # a run that was stopped after its last step evaluates again
            self._has_others = True
        if self._has_others:
            scratch = self._path.with_suffix(".tmp")
            scratch.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
            os.replace(scratch, self._path)
            self._has_others = False
        self.rows.append(row)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._log is not None:
            self._log(row)

    def status(self) -> str:
        """The figures of the last step in one line, with the newest loss on the held-out part and the latest speed."""
        row = self.rows[-1]
        parts = [f"loss {row['loss']:.3f}"]
        held_out = next((each["evaluation_loss"] for each in reversed(self.rows) if "evaluation_loss" in each), None)
        parts += [] if held_out is None else [f"held out {held_out:.3f}"]
        parts.append(f"lr {row['learning_rate']:.2g}")
        parts += [] if row["gradient_norm"] is None else [f"norm {row['gradient_norm']:.2g}"]
        speeds = [each["tokens_per_s"] for each in self.rows[-_RECENT_ROWS:] if each.get("tokens_per_s") is not None]
        speed = median(speeds) if speeds else 0.0  # one step alone says little where others use the machine
        parts += [] if not speeds else [f"{speed:,.0f} tok/s" if speed < 1e5 else f"{speed / 1e3:,.0f}k tok/s"]
        return "  ".join(parts)

    def losses(self) -> dict[int, float]:
        """The training loss of each step, in order. Damaged lines have none."""
        return {row["step"]: row["loss"] for row in self.rows if "loss" in row}

    def times_ms(self, name: str, *, own: bool) -> list[float]:
        """The times ``name`` of the steps that have one, in order; with ``own`` only of steps in this process."""
        rows = [row for row in self.rows if row["step"] > self._resumed_step or not own]
        return [row[name] for row in rows if row.get(name) is not None]


def steps_reached(folder: Path) -> int:
    """The last step that the run in ``folder`` has reported, or 0."""
    path = folder / METRICS_FILE
    return max((int(row["step"]) for row in _read_rows(path)), default=0) if path.exists() else 0


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows up to the first damaged line.

    A process that was killed while it wrote a line leaves a damaged last line. Rows are only for reports, so damage
    must not stop a run.
    """
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not _is_row(row):
            break
        rows.append(row)
    return rows


def _is_row(row: Any) -> bool:
    """Whether ``row`` names its step and holds numbers."""
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return False
    return all(
        isinstance(value, int | float) or (value is None and name not in ("loss", "evaluation_loss"))
        for name, value in row.items()
    )


class ProgressLine:
    """Shows progress on standard error: a live line in a terminal, and a plain line now and then elsewhere.

    A line that is wider than a terminal of 80 columns has one space between its figures instead of two.
    """

    def __init__(self, description: str, total: int, *, done: int = 0) -> None:
        self._description = description
        self._total = total
        self._first, self._begun_s = done, time.monotonic()
        self._line = f"{description}{done}/{total}"

    def __enter__(self) -> ProgressLine:
        self._show()
        return self

    def __exit__(self, *exception: object) -> None:
        if is_terminal():
            say(self._line)

    def update(self, done: int, status: str, *, plain: bool) -> None:
        """Show ``status`` and the time that is left. Outside a terminal it is printed only if ``plain`` asks for it."""
        left = ""
        if self._first < done < self._total:
            left_s = (time.monotonic() - self._begun_s) / (done - self._first) * (self._total - done)
            left = f"{timedelta(seconds=round(left_s))} left"
        text = "  ".join(part for part in (f"{self._description}{done}/{self._total}", status, left) if part)
        before, self._line = self._line, text if len(text) <= WIDTH else text.replace("  ", " ")
        if plain and not is_terminal():
            say(self._line)
        elif self._line != before:
            self._show()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        say(text)
        self._show()

    def _show(self) -> None:
        if is_terminal():
            say_in_place(self._line)


def resident_bytes() -> int:
    """The memory that this process holds now. On other systems than Linux, it is the most that it ever held."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return peak_resident_bytes()
    return pages * resource.getpagesize()


def peak_resident_bytes() -> int:
    """The most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def draw_loss_curve(folder: Path, rows: list[dict[str, Any]], unigram_entropy: float) -> Path:
    """Draw the training loss and the held-out loss by step to loss.png. Returns its path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = [row["step"] for row in rows if "loss" in row]
    losses = [row["loss"] for row in rows if "loss" in row]
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(steps, _smoothed(losses), color="tab:blue", label="training (smoothed)")
    held_out = [(row["step"], row["evaluation_loss"]) for row in rows if "evaluation_loss" in row]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held out")
    axes.axhline(unigram_entropy, color="gray", linestyle=":", label="unigram entropy of the data")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend()
    path = folder / CURVE_FILE
    figure.savefig(path, dpi=120)
    return path


def _smoothed(values: list[float], weight: float = 0.9) -> list[float]:
    """The exponential moving average of ``values``, corrected for its start."""
    average, norm, smoothed = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smoothed.append(average / norm)
    return smoothed
