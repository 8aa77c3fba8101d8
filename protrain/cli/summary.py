"""TrainSummary: what a finished run came to."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from protrain.common.records import Record
from protrain.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class TrainSummary(Record):
    """Figures of a run. Times are of a whole step, optimizer included, the first few left out.

    Saves and evaluations are in none of them. Where each step has one after it, times are of steps that stand alone.
    """

    file_kind = "the summary of a run of `protrain train`"

    command: str
    device: str
    versions: dict[str, str]
    model: str
    parameters: int
    dtype: str
    batch: int
    sequence: int
    accumulation: int
    tokens_per_step: int
    steps: int
    initial_loss: float | None  # of the first step; None where metrics.jsonl was damaged
    final_loss: float | None  # mean of the last tenth of the steps
    evaluation_loss: float | None  # on the held-out part, at the end
    unigram_entropy: float  # of the data, nats a token: the loss of a model that ignores context
    step_ms: float | None  # median
    step_ms_p20: float | None
    step_ms_p80: float | None
    steps_alone: bool = False  # no update of a step went on beside the next one, so that times are longer than else
    tokens_per_s: float | None
    parameter_tflops: float | None  # 6 x parameters x tokens/s
    model_tflops: float | None  # with causal attention counted; recomputation is not
    device_peak_bytes: int  # allocated by tensors; on a CPU: of the simulated device
    device_reserved_bytes: int  # held by the caching allocator
    predicted_device_bytes: int
    host_bytes: int  # of the engine
    predicted_host_bytes: int
    process_peak_bytes: int  # resident memory of the whole process
    plan: Plan

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the printed table, with versions and plan as people write them."""
        own = {"versions": ", ".join(f"{name} {text}" for name, text in self.versions.items()), "plan": str(self.plan)}
        return [(name, own.get(name, value)) for name, value in super().rows()]

    def last_line(self) -> str:
        """Initial and final loss, tokens/s and the plan, in one line."""
        held_out = "" if self.evaluation_loss is None else f", held out {self.evaluation_loss:.3f}"
        speed = "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}"
        alone = " in steps that each stood alone" if self.steps_alone else ""
        first, last = ("-" if loss is None else f"{loss:.3f}" for loss in (self.initial_loss, self.final_loss))
        return (
            f"loss {first} -> {last} (unigram entropy {self.unigram_entropy:.3f}"
            f"{held_out}), {speed} tokens/s{alone}, plan {self.plan}"
        )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a figure depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers", "protrain"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout, or no Triton for this system
            found[package] = "not installed"
    return found


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"
