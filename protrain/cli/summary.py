"""TrainSummary: the results of a finished run."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from protrain.common.records import Record
from protrain.hardware.memory import processor_name
from protrain.planning.plan import Plan
from protrain.profiler.kept_profiles import version_of


@dataclass(frozen=True, kw_only=True)
class TrainSummary(Record):
    """The results of a run. Times are those of whole steps, optimizer included, without the first few.

    Saves and evaluations are not in the times. If every step has one after it, times are those of steps that stand
    alone.
    """

    file_kind = "the summary of a run of `protrain train`"

    command: str
    device: str
    versions: dict[str, str]
    model: str
    parameters: int
    trained_parameters: int
    dtype: str
    batch: int
    sequence: int
    accumulation: int  # on each GPU
    gpus: int = 1  # or processes that train together on a CPU; device and memory are those of the first
    tokens_per_step: int
    steps: int
    initial_loss: float | None  # of the first step; None if metrics.jsonl was damaged
    final_loss: float | None  # the mean of the last tenth of the steps
    evaluation_loss: float | None  # on the held-out part, after the last step
    unigram_entropy: float  # of the data, in nats per token: the loss of a model that ignores context
    step_ms: float | None  # the median
    step_ms_p20: float | None
    step_ms_p80: float | None
    # whether no update overlapped with the next step, so that times are longer than otherwise
    steps_alone: bool = False
    tokens_per_s: float | None
    parameter_tflops: float | None  # 6 x parameters x tokens/s; 4 x those that are frozen
    model_tflops: float | None  # counts causal attention, but no recomputation
    device_peak_bytes: int  # allocated by tensors; on a CPU, of the simulated device
    device_reserved_bytes: int  # held by the caching allocator
    predicted_device_bytes: int
    host_bytes: int  # the engine's host memory
    predicted_host_bytes: int
    process_peak_bytes: int  # the resident memory of the whole process
    plan: Plan

    def rows(self) -> list[tuple[str, str]]:
        """The rows of the printed table, with readable versions and plan."""
        own = {"versions": ", ".join(f"{name} {text}" for name, text in self.versions.items()), "plan": str(self.plan)}
        return [(name, own.get(name, value)) for name, value in super().rows()]

    def last_line(self) -> str:
        """The initial and the final loss, tokens/s and the plan."""
        held_out = "" if self.evaluation_loss is None else f", held out {self.evaluation_loss:.3f}"
        speed = "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}"
        alone = " in steps that each stood alone" if self.steps_alone else ""
        first, last = ("-" if loss is None else f"{loss:.3f}" for loss in (self.initial_loss, self.final_loss))
        return (
            f"loss {first} -> {last} (unigram entropy {self.unigram_entropy:.3f}"
            f"{held_out}), {speed} tokens/s{alone}, plan {self.plan}"
        )


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that results depend on."""
    others = "triton", "transformers", "protrain"  # of which this one may run from a checkout
    found = {package: version_of(package) for package in others}
    return {"python": platform.python_version(), "torch": torch.__version__, **found}


def device_name(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' * (threads > 1)}"
