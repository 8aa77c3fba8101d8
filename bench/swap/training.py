"""The models of this benchmark, and one of them in training under a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from typing_extensions import override

import protrain
from bench.planner.clock import durations_ms, now
from protrain.common.records import Record
from protrain.common.tables import format_bytes, format_ms
from protrain.hardware.calibration.timing import quintiles_of
from protrain.planning import Plan
from protrain.profiler.cache import cached_profile
from protrain.profiler.model_profile import ModelProfile

_CLIP_NORM = 1e6  # gradients are never that long: predictions are about steps that are not clipped
WARM_UP = 3  # steps


@dataclass(frozen=True, kw_only=True)
class Case(Record):
    """A model of equal blocks, a batch, and limits of device memory to look at."""

    family: str  # "gpt2", "llama" or "opt"
    hidden: int
    layers: int
    batch: int
    sequence: int = 1024
    dropout: float = 0.0
    limits: tuple[int, ...] = ()  # bytes
    defined_in_reverse: bool = False  # a LLaMA defines its blocks last to first, and runs them first to last

    @property
    def name(self) -> str:
        """What it is called in tables."""
        dropout = f", dropout {self.dropout}" if self.dropout else ""
        reverse = ", defined in reverse" if self.defined_in_reverse else ""
        return f"{self.family} {self.hidden} x {self.layers}, {self.batch} x {self.sequence}{dropout}{reverse}"


TINY = Case(family="gpt2", hidden=128, layers=4, batch=2, sequence=64, dropout=0.1)


class DefinedInReverse(nn.ModuleList):
    """``layers`` defined last to first. A slice of it has them first to last, as a transformers model runs them."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__(reversed(layers))

    @override
    def __getitem__(self, idx: Any) -> Any:
        return list(reversed(self._modules.values()))[idx]


def build(case: Case) -> tuple[Any, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """Model without memory, optimizer, and a batch of random tokens."""
    import transformers

    heads, words = case.hidden // (128 if case.hidden >= 1024 else 32), 32000 if case.hidden >= 1024 else 256
    common: dict[str, Any] = {"vocab_size": words, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
    config: Any
    if case.family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=case.hidden,
            n_layer=case.layers,
            n_head=heads,
            n_positions=case.sequence,
            resid_pdrop=case.dropout,
            embd_pdrop=case.dropout,
            attn_pdrop=case.dropout,
            **common,
        )
    elif case.family == "llama":
        config = transformers.LlamaConfig(
            hidden_size=case.hidden,
            num_hidden_layers=case.layers,
            num_attention_heads=heads,
            intermediate_size=case.hidden * 43 // 16,
            max_position_embeddings=case.sequence,
            pad_token_id=None,
            **common,
        )
    else:
        config = transformers.OPTConfig(
            hidden_size=case.hidden,
            word_embed_proj_dim=case.hidden,
            ffn_dim=4 * case.hidden,
            num_hidden_layers=case.layers,
            num_attention_heads=heads,
            max_position_embeddings=case.sequence,
            dropout=case.dropout,
            **common,
        )
    torch.manual_seed(0)  # for the start values, so that losses can be compared
    with protrain.empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    if case.defined_in_reverse:
        model.model.layers = DefinedInReverse(model.model.layers)
    ids = torch.randint(3, words, (case.batch, case.sequence), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    return model, optimizer, {"input_ids": ids, "labels": ids}


def profiled(case: Case, device: torch.device) -> ModelProfile:
    """The profile that wrapping makes its plan from."""
    model, optimizer, batch = build(case)
    return cached_profile(model, batch, optimizer=optimizer, device=device, dtype=dtype_on(device))


def dtype_on(device: torch.device) -> torch.dtype:
    """The dtype of weights on ``device``."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Training:
    """A model under one plan, and its steps."""

    def __init__(self, case: Case, plan: Plan, device: torch.device, **limits: Any) -> None:
        model, optimizer, self.batch = build(case)
        self.device = device
        self.losses: list[torch.Tensor] = []
        self.step_ms: list[float] = []
        self.peak_bytes = 0  # of the device memory that it takes, whatever else lies there
        self._held_bytes = 0  # of it between steps
        with self._own_memory():
            self.model, self.optimizer = protrain.wrap(
                model, optimizer, example_batch=self.batch, device=device, plan=plan, progress=False, **limits
            )
        self.peak_bytes = 0  # wrapping may have profiled

    @contextmanager
    def _own_memory(self) -> Iterator[None]:
        """Count what the body allocates: another training's memory does not change meanwhile."""
        if self.device.type == "cpu":
            yield
            self.peak_bytes = self.optimizer.report().device_bytes
            return
        before_bytes = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        others_bytes = before_bytes - self._held_bytes
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.device) - others_bytes)
        self._held_bytes = torch.cuda.memory_allocated(self.device) - others_bytes

    def run(self, steps: int, *, untimed: int = 0) -> None:
        """Train for ``untimed`` steps and then ``steps`` more. Note all losses, and how long every later step takes."""
        with self._own_memory():
            durations = self._steps(untimed + steps)
        self.step_ms += durations[untimed:]

    def _steps(self, steps: int) -> tuple[float, ...]:
        moments = [now(self.device)]
        for _ in range(steps):
            torch.manual_seed(len(self.losses))
            output = self.model(**self.batch)  # held until the next, as plans allow for
            output.loss.backward()
            self.losses.append(output.loss.detach())
            self.optimizer.clip_grad_norm_(_CLIP_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            moments.append(now(self.device))
        return durations_ms(moments, self.device)


@dataclass(frozen=True, kw_only=True)
class Measured(Record):
    """What a plan did, beside what was predicted."""

    plan: Plan
    median_ms: float
    p20_ms: float
    p80_ms: float
    device_bytes: int
    host_bytes: int

    @classmethod
    def of(cls, training: Training) -> Measured:
        """What it has measured so far."""
        p20_ms, p80_ms = quintiles_of(training.step_ms)
        return cls(
            plan=training.optimizer.plan,
            median_ms=median(training.step_ms),
            p20_ms=p20_ms,
            p80_ms=p80_ms,
            device_bytes=training.peak_bytes,
            host_bytes=training.optimizer.report().host_bytes,
        )

    def cells(self) -> list[str]:
        """Step time with its spread and as predicted; memory, and planned."""
        return [
            f"{format_ms(self.median_ms)} ({self.p20_ms:.1f} to {self.p80_ms:.1f})",
            format_ms(self.plan.step_ms),
            f"{format_bytes(self.device_bytes)} of {format_bytes(self.plan.device_bytes)}",
            format_bytes(self.host_bytes),
        ]
