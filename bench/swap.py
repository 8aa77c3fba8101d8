"""Swapped blocks on the machine: packed against direct copies, and the best plan with them against the best without.

    python -m bench.swap --out bench/results/h100
    python -m bench.swap --part copies                 # the first of the two parts alone

copies   every block but the last two is swapped, once packed and once storage by storage, in steps that take turns;
         all model states stay on the device, so that nothing else is on the link. With the copies and launches of a
         step, from a trace of it, and whether all losses were the same.
limits   the device memory is limited, at the limit at which swapping is predicted to gain most. The best plan that
         swaps blocks and the best that does not, both predicted and measured.

On a CPU both parts run on a tiny model, to show that they do; nothing there says how fast a GPU is.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import protrain
from bench.planner.clock import durations_ms, now
from bench.planner.output import put_out, write_out
from protrain.cli.summary import device_name, versions
from protrain.common.quantities import format_bytes
from protrain.common.records import Record
from protrain.hardware import HardwareProfile, detect
from protrain.hardware.calibration.timing import spread_of
from protrain.planning import (
    MemoryModel,
    Plan,
    RuntimeModel,
    block_modes,
    check,
    choose_chunk_elements,
    evaluate,
    pack,
    search,
)
from protrain.planning.tables import aligned, format_ms
from protrain.profiler import ModelProfile
from protrain.profiler.cache import cached_profile

FILE = "swap.json"
GIB = 1024**3
_CLIP_NORM = 1e6  # gradients are never that long: predictions are about steps that are not clipped
_WARM_UP = 3
_HOST_MEMORY = "72GiB"  # of a limited plan: to pin more takes most of the time


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

    @property
    def name(self) -> str:
        """What it is called in tables."""
        dropout = f", dropout {self.dropout}" if self.dropout else ""
        return f"{self.family} {self.hidden} x {self.layers}, {self.batch} x {self.sequence}{dropout}"


COPIES = tuple(
    Case(family=family, hidden=2048, layers=8, batch=batch, dropout=dropout)
    for family, dropout in (("gpt2", 0.1), ("llama", 0.0))
    for batch in (1, 16)
)
# The wider a block, the more it computes for every byte that it saves, and OPT's blocks save least: those of 66 B and of
# 175 B compute nearly as long as an H100's link takes for what they save.
LIMITS = tuple(
    Case(family="opt", hidden=hidden, layers=layers, batch=32, limits=tuple(n * GIB for n in range(24, 74, 2)))
    for hidden, layers in ((9216, 3), (12288, 2))
)
TINY = Case(family="gpt2", hidden=128, layers=4, batch=2, sequence=64, dropout=0.1)


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
    ids = torch.randint(3, words, (case.batch, case.sequence), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    return model, optimizer, {"input_ids": ids, "labels": ids}


def profiled(case: Case, device: torch.device) -> ModelProfile:
    """The profile that wrapping makes its plan from."""
    model, optimizer, batch = build(case)
    return cached_profile(model, batch, optimizer=optimizer, device=device, dtype=dtype_on(device))


def dtype_on(device: torch.device) -> torch.dtype:
    """What is trained there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Training:
    """A model under one plan, and its steps."""

    def __init__(self, case: Case, plan: Plan, device: torch.device, **limits: Any) -> None:
        model, optimizer, self.batch = build(case)
        self.device = device
        self.losses: list[torch.Tensor] = []
        self.step_ms: list[float] = []
        self.model, self.optimizer = protrain.wrap(
            model, optimizer, example_batch=self.batch, device=device, plan=plan, progress=False, **limits
        )

    def run(self, steps: int, *, timed: bool = True) -> None:
        """Train, and note losses and how long every step takes."""
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
        durations = durations_ms(moments, self.device)
        self.step_ms += durations if timed else ()


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
        spread, report = spread_of(training.step_ms), training.optimizer.report()
        return cls(
            plan=training.optimizer.plan,
            median_ms=spread.median,
            p20_ms=spread.p20,
            p80_ms=spread.p80,
            device_bytes=report.device_bytes,
            host_bytes=report.host_bytes,
        )

    def cells(self) -> list[str]:
        """Step time with its spread and as predicted; memory, and planned."""
        return [
            f"{format_ms(self.median_ms)} ({self.p20_ms:.1f} to {self.p80_ms:.1f})",
            format_ms(self.plan.step_ms),
            f"{format_bytes(self.device_bytes)} of {format_bytes(self.plan.device_bytes)}",
            format_bytes(self.host_bytes),
        ]


# -- packed against direct copies


@dataclass(frozen=True, kw_only=True)
class Way(Record):
    """Blocks swapped in one way. Counts are of one step; 0 on a CPU."""

    packed: bool
    measured: Measured
    copies_down: int
    copies_up: int
    pack_launches: int
    unpack_launches: int
    kernels: int


@dataclass(frozen=True, kw_only=True)
class CopiesRow(Record):
    """Both ways for one model."""

    case: Case
    saved_bytes: int  # by a block
    saved_tensors: int
    saved_bool_bytes: int
    chosen: bool  # whether the runtime model packs these blocks
    same_losses: bool
    ways: tuple[Way, ...]


def measure_copies(case: Case, device: torch.device, *, rounds: int, steps: int) -> CopiesRow:
    """Direct and packed, in turns of some steps."""
    profile, hardware = profiled(case, device), detect(device)
    n_chunks, n_blocks = len(pack(profile, choose_chunk_elements(profile)).chunks), len(profile.blocks)
    plan = evaluate(profile, hardware, n_persist=n_chunks, n_buffer=0, n_swap=n_blocks - 2, n_ckpt=0)
    trainings = {}
    for packed in (False, True):
        forced = check(replace(plan, pack_swaps=(packed,) * n_blocks), profile, hardware)
        trainings[packed] = Training(case, forced, device)
        trainings[packed].run(_WARM_UP, timed=False)
    for _ in range(rounds):
        for training in trainings.values():
            training.run(steps)
    losses = [[float(loss) for loss in training.losses] for training in trainings.values()]
    block = profile.blocks[0]
    return CopiesRow(
        case=case,
        saved_bytes=block.saved_bytes,
        saved_tensors=block.saved_tensors,
        saved_bool_bytes=block.saved_bool_bytes,
        chosen=any(plan.pack_swaps),
        same_losses=losses[0] == losses[1],
        ways=tuple(
            Way(packed=packed, measured=Measured.of(training), **counts_of(training))
            for packed, training in trainings.items()
        ),
    )


def counts_of(training: Training) -> dict[str, int]:
    """Copies and launches of one step, by a trace of what the device did."""
    counts: Counter[str] = Counter()
    if training.device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace:
            training.run(1, timed=False)
        for event in trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                counts[_kind_of(event.name)] += 1
    names = ("copies_down", "copies_up", "pack_launches", "unpack_launches", "kernels")
    kernels = counts["kernels"] + counts["pack_launches"] + counts["unpack_launches"]
    return {name: counts[name] for name in names} | {"kernels": kernels}


def _kind_of(name: str) -> str:
    begins = {
        "Memcpy DtoH": "copies_down",
        "Memcpy HtoD": "copies_up",
        "Memcpy": "others",
        "Memset": "others",
        "pack_kernel": "pack_launches",
        "unpack_kernel": "unpack_launches",
    }
    return next((kind for begin, kind in begins.items() if name.startswith(begin)), "kernels")


# -- the best plan with swapped blocks against the best without


@dataclass(frozen=True, kw_only=True)
class LimitRow(Record):
    """The best plan with swapped blocks and the best without, under one limit."""

    case: Case
    limit_bytes: int
    with_swaps: Measured
    without: Measured
    searched: Plan  # what wrapping would choose


def best_plan(profile: ModelProfile, hardware: HardwareProfile, *, swaps: bool) -> Plan | None:
    """The fastest plan with swapped blocks, or without, by trying all; None where none fits."""
    n_blocks, found = len(profile.blocks), []
    for keep_attention in (False, True):
        kept = profile.keeping_attention() if keep_attention else profile
        memory = MemoryModel(kept, hardware, pack(kept, choose_chunk_elements(kept)))
        runtime = RuntimeModel(memory)
        for n_swap in range(1, n_blocks + 1) if swaps else (0,):
            for n_ckpt in range(n_blocks - n_swap + 1):
                for n_moved in {0, n_ckpt // 2, n_ckpt}:
                    of_blocks = n_blocks, n_swap, n_ckpt, n_moved
                    placed = _placements(runtime, memory, of_blocks)
                    placed += _placements(runtime.making_weights(), memory.making_weights(), of_blocks)
                    keeps = {"keep_attention": keep_attention and n_ckpt > 0}
                    found += [(step_ms, counts | keeps) for counts, step_ms in placed]
    if not found:
        return None
    _, counts = min(found, key=lambda one: one[0])
    return evaluate(profile, hardware, **counts)


def _placements(
    runtime: RuntimeModel, memory: MemoryModel, of_blocks: tuple[int, int, int, int]
) -> list[tuple[dict[str, Any], float]]:
    """What fits beside blocks treated so, with the step time of each."""
    modes, found = block_modes(*of_blocks), []
    blocks = dict(zip(("n_swap", "n_ckpt", "n_ckpt_swap"), of_blocks[1:], strict=True))
    activations = memory.activations(modes)
    margined, swapped = np.array(memory.margined_bytes(activations)), np.array(activations.swapped_bytes)
    for n_persist in range(len(memory.layout.chunks) + 1):
        n_buffer = int(memory.most_buffers(n_persist, margined))
        if n_buffer < memory.least_buffers(n_persist):
            continue
        if memory.host_bytes_beside(n_persist, activations.swapped_bytes) > memory.hardware.host_bytes:
            continue
        most_early = int(memory.most_early(n_persist, swapped)) if runtime.speculates else 0
        step_ms, n_speculate = runtime.fitted_ms(modes, n_persist, n_buffer, most_early)
        early = {"n_speculate": n_speculate, "early_weights": memory.early_weights and n_speculate > 0}
        found.append(({"n_persist": n_persist, "n_buffer": n_buffer, **blocks, **early}, step_ms))
    return found


def promising(case: Case, profile: ModelProfile, hardware: HardwareProfile) -> tuple[int, Plan, Plan]:
    """The limit at which swapping is predicted to gain most, and the best plans with it and without."""
    found = []
    for limit in case.limits:
        limited = replace(hardware, device_bytes=limit)
        swapping, without = (best_plan(profile, limited, swaps=swaps) for swaps in (True, False))
        if swapping is not None and without is not None:
            found.append((without.step_ms / swapping.step_ms, limit, swapping, without))
    if not found:
        raise SystemExit(f"{case.name}: nothing fits under any of its limits")
    return max(found, key=lambda one: one[0])[1:]


def measure_limits(case: Case, device: torch.device, *, steps: int) -> LimitRow:
    """Both plans, one after the other: each may need most of the host's memory."""
    host_memory = _HOST_MEMORY if device.type == "cuda" else "1GiB"
    profile, hardware = profiled(case, device), detect(device, host_memory=host_memory)
    limit, *plans = promising(case, profile, hardware)
    measured = []
    for plan in plans:
        training = Training(case, plan, device, device_memory=limit, host_memory=host_memory)
        training.run(_WARM_UP, timed=False)
        training.run(steps)
        measured.append(Measured.of(training))
        del training
        gc.collect()
    searched = search(profile, replace(hardware, device_bytes=limit))
    return LimitRow(case=case, limit_bytes=limit, with_swaps=measured[0], without=measured[1], searched=searched)


@dataclass(frozen=True, kw_only=True)
class Swaps(Record):
    """All of it."""

    command: str
    device: str
    versions: dict[str, str]
    copies: tuple[CopiesRow, ...] = ()
    limits: tuple[LimitRow, ...] = ()

    def table(self) -> str:
        """As text."""
        titles = ["step (p20 to p80)", "predicted", "device memory, of planned", "host memory"]
        rows = [["model", "a block saves", "copies", *titles, "down, up", "pack, unpack", "kernels", "losses"]]
        for copies in self.copies:
            saved = f"{format_bytes(copies.saved_bytes)} in {copies.saved_tensors}"
            for way in copies.ways:
                chosen = " *" if way.packed is copies.chosen else ""
                counts = [f"{way.copies_down}, {way.copies_up}", f"{way.pack_launches}, {way.unpack_launches}"]
                same = "same" if copies.same_losses else "DIFFER"
                kind = ("packed" if way.packed else "direct") + chosen
                rows.append([copies.case.name, saved, kind, *way.measured.cells(), *counts, str(way.kernels), same])
        parts = [f"{self.device}; * is what the runtime model chooses", aligned(rows)] if self.copies else []
        rows = [["model", "limit", *titles, "plan"]]
        for row in self.limits:
            for measured in (row.with_swaps, row.without):
                rows.append([row.case.name, format_bytes(row.limit_bytes), *measured.cells(), str(measured.plan)])
            rows.append(["", "searched", "", format_ms(row.searched.step_ms), "", "", str(row.searched)])
        return "\n".join([*parts, aligned(rows)] if self.limits else parts)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench.swap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help=f"folder for {FILE}")
    parser.add_argument("--part", choices=("copies", "limits"), help="(default: both)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of either way of copying (default: 6)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, of a turn or of a limited plan (default: 4)")
    args = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    copies, limits = (COPIES, LIMITS) if device.type == "cuda" else ((TINY,), (replace(TINY, limits=_tiny_limits()),))
    result = Swaps(
        command=f"python -m bench.swap {shlex.join(arguments)}", device=device_name(device), versions=versions()
    )
    for case in copies if args.part != "limits" else ():
        row = measure_copies(case, device, rounds=args.rounds, steps=args.steps)
        result = _with(result, args.out, copies=(*result.copies, row))
    for case in limits if args.part != "copies" else ():
        limit_row = measure_limits(case, device, steps=args.steps)
        result = _with(result, args.out, limits=(*result.limits, limit_row))
    put_out(result, args.out, FILE)
    return 0 if all(row.same_losses for row in result.copies) else 1


def _with(result: Swaps, folder: Path | None, **rows: Any) -> Swaps:
    """``result`` with more rows, written at once: the run may be ended before its end."""
    result = replace(result, **rows)
    write_out(result, folder, FILE)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def _tiny_limits() -> tuple[int, ...]:
    return tuple(n * 1024**2 for n in range(6, 20, 2))


if __name__ == "__main__":
    sys.exit(main())
