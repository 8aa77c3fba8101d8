"""What `protrain plan` does: it finds out what would be done with a model on a machine, without doing it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import protrain
from protrain.cli.data import example_batch, stand_in
from protrain.cli.lora import refuse_4bit_alone
from protrain.cli.models import LoadedModel, describe, fit_positions, read_architecture
from protrain.cli.options import emit, in_options, write_record
from protrain.cli.plan_answer import Answer, Machine
from protrain.cli.plan_machine import machine_of, machines_of
from protrain.cli.plan_picture import check_picture, draw_frontier, draw_timeline
from protrain.cli.plan_text import summary_text, timeline_text
from protrain.cli.prepare import adamw, choose_compile, choose_dtype, choose_loss
from protrain.cli.shapes import SHAPES
from protrain.cli.sources import find_source
from protrain.cli.trained import choose_trained, shape_in_4bit
from protrain.common.errors import PlanError
from protrain.common.progress import COUNTED, Progress
from protrain.common.quantities import format_bytes
from protrain.common.tables import format_ms, wrapped
from protrain.forwards import change_forwards
from protrain.hardware import HardwareProfile
from protrain.planning import Explanation, Plan, compare, frontier, largest
from protrain.planning.explain.explanation import explain
from protrain.planning.predict import predict
from protrain.planning.timeline import Timeline
from protrain.profiler import ModelProfile
from protrain.profiler.cache import cached_profile, counted_profile


def run(args: argparse.Namespace) -> None:
    """Run `protrain plan`."""
    if args.picture is not None:
        if args.max_model or args.compare:
            raise ValueError("--picture goes with a plan or --frontier: --max-model and --compare draw nothing")
        check_picture(args.picture)
    if args.compare is not None:
        _compare(args)
        return
    hardware = machine_of(args)
    if args.max_model:
        _max_model(args, hardware)
        return
    say = Progress(enabled=True)
    with say.stage("profiling the model") as show:
        profile = _profile(args, hardware, show=show)
    if args.frontier:
        with say.stage("planning under every limit"):
            found = frontier(profile, hardware, step_during_backward=args.step_during_backward)
        if args.picture is not None:
            draw_frontier(found, args.picture)
        title = wrapped(f"{Machine.of(hardware)}\n{_title(args, profile, hardware.world_size)}", indent="  ")
        emit(found, args, f"{title}\n\n{found.table()}{_about_loss(args, hardware)}")
        return
    inside = args.step_during_backward
    try:
        with say.stage("planning"):
            plan = protrain.search(profile, hardware, step_during_backward=inside)
            timeline = predict(profile, hardware, plan, step_during_backward=inside).timeline
    except PlanError as error:
        if args.json:
            print(in_options(Answer.of(profile, hardware, error).to_json()), flush=True)
        raise
    if args.picture is not None:
        draw_timeline(timeline, f"{profile.model}, {hardware.name}, {plan}: {format_ms(plan.step_ms)}", args.picture)
    with say.stage("explaining"):
        why = explain(plan, profile, hardware, step_during_backward=inside, more_memory=args.explain)
    answer = Answer.of(profile, hardware, why)
    print(answer.to_json() if args.json else _text(args, profile, hardware, why, timeline, answer.verdict), flush=True)
    write_record(plan, args)


def _text(
    args: argparse.Namespace,
    profile: ModelProfile,
    hardware: HardwareProfile,
    why: Explanation,
    timeline: Timeline,
    verdict: str,
) -> str:
    """The verdict and one step; with --explain what would change it, and the machine."""
    answer = summary_text(why, profile, hardware, updates_in_backward=args.step_during_backward)
    details = [("one step", timeline_text(timeline))]
    if args.explain:
        details += [
            ("the prediction, and what would change it", why.table()),
            ("the machine, as far as it is known", hardware.table()),
        ]
    sections = [f"{title.upper()}\n{table}" for title, table in details]
    sections += [] if args.explain else ["--explain says what would change it, and what is assumed of the machine."]
    title = wrapped(f"{verdict}\n{_title(args, profile, hardware.world_size)}", indent="  ")
    return "\n\n".join([f"{title}\n{answer}{_about_loss(args, hardware)}", *sections])


def _profile(
    args: argparse.Namespace, hardware: HardwareProfile, layers: int | None = None, *, show: Callable[[str], None]
) -> ModelProfile:
    """Measured here, or counted where the model is to run elsewhere or takes more memory than there is here."""
    refuse_4bit_alone(args.lora, load_in_4bit=args.load_in_4bit)
    device = torch.device(hardware.device_type)
    step: dict[str, Any] = {
        "batch": args.batch,
        "rows": args.data is not None and find_source(args.data).kind == "rows",
        "dtype": choose_dtype(args.dtype, device),
        "compile": choose_compile(args.compile, device),
        "chunked_loss": choose_loss(args.chunked_loss, device),
    }

    def traced(*, elsewhere: bool) -> ModelProfile:
        # Nothing is computed for a machine that is elsewhere, so there is no need for a record of how values are made.
        with torch.device("meta") if elsewhere else nullcontext():
            loaded = read_architecture(args.model, layers=layers)
            if args.load_in_4bit:
                shape_in_4bit(loaded.model)
            loaded = choose_trained(loaded, args.lora, args.freeze)
        where: dict[str, Any] = {"device": device, "elsewhere": elsewhere, "device_bytes": hardware.device_bytes}
        return profile_of(loaded, **step, sequence=args.sequence or loaded.sequence, **where, show=show)

    profile = None
    if not (args.hardware or args.compare or args.load_in_4bit):  # 4-bit weights have no values before training
        with suppress(torch.OutOfMemoryError):
            profile = traced(elsewhere=False)
        if profile is None:
            Progress(enabled=True).note(COUNTED)
    if profile is None:
        # All that decides what is counted. Building the model would take longer than planning for it.
        decides = {
            **step,
            "dtype": str(step["dtype"]),
            "model": describe(args.model, layers=layers),
            "sequence": args.sequence,
            "trained": (args.lora, args.load_in_4bit, args.freeze),
        }
        profile = counted_profile(decides, partial(traced, elsewhere=True))
    return replace(profile, accumulation=args.accumulation, moment_dtype=args.moment_dtype)


def profile_of(
    architecture: LoadedModel,
    *,
    batch: int,
    sequence: int,
    device: torch.device,
    dtype: torch.dtype,
    compile: bool,
    chunked_loss: bool,
    elsewhere: bool,
    rows: bool = False,
    show: Callable[[str], None] | None = None,
    device_bytes: int | None = None,
) -> ModelProfile:
    """The profile of a step of `protrain train` on ``device``. The forwards of the model are changed.

    If it is to run ``elsewhere``, operations are counted on the meta device, as times of another machine cannot be
    measured here. If sequences are packed of ``rows`` of data, attention needs a mask. Measuring takes at most
    ``device_bytes``.
    """
    fit_positions(architecture, sequence)
    example = example_batch(stand_in(sequence, rows=rows), seed=0, batch=batch, sequence=sequence)
    if compile and elsewhere:
        torch.compiler.reset()  # there is a limit to what is kept of one function, and these may be many models
    change_forwards(architecture.model, device, compile=compile, chunked_loss=chunked_loss, on_meta=elsewhere)
    optimizer = adamw(architecture.model, architecture.learning_rate, weight_decay=0.0)
    how: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype, "show": show}
    if elsewhere:
        return protrain.profile(architecture.model, architecture.arguments(example), device="meta", **how)
    return cached_profile(
        architecture.model, architecture.arguments(example), device=device, device_bytes=device_bytes, **how
    )


def _max_model(args: argparse.Namespace, hardware: HardwareProfile) -> None:
    if args.model not in SHAPES:
        raise ValueError(f"--max-model needs a shape that comes at any depth: one of {', '.join(SHAPES)}")
    with Progress(enabled=True).stage("looking for the largest depth") as show:
        found = largest(
            lambda layers: _profile(args, hardware, layers, show=lambda part: show(f"{layers} layers: {part}")),
            hardware,
            step_during_backward=args.step_during_backward,
        )
    largest_model = f"the largest model of the width of {args.model}, {_computed(found.plan)}"
    title = wrapped(f"{Machine.of(hardware)}\n{largest_model}", indent="  ")
    emit(found, args, f"{title}\n{in_options(found.table())}{_about_loss(args, hardware)}")


def _compare(args: argparse.Namespace) -> None:
    machines = machines_of(args)
    first = next(iter(machines.values()))
    say = Progress(enabled=True)
    with say.stage("profiling the model") as show:
        profile = _profile(args, first, show=show)
    with say.stage("planning for every machine"):
        found = compare(profile, machines, step_during_backward=args.step_during_backward)
    lines = [_title(args, profile, 1, " and GPU")]
    lines += [f"{name}: {Machine.of(machine)}" for name, machine in machines.items()]
    title = wrapped("\n".join(lines), indent="  ")
    emit(found, args, f"{title}\n\n{found.table()}{_about_loss(args, first)}")


def _title(args: argparse.Namespace, profile: ModelProfile, n_gpus: int, each: str = "") -> str:
    tokens = f"{profile.tokens * profile.accumulation * n_gpus:,} tokens a step{each}"
    how = f"blocks {'compiled' if profile.compiled else 'eager'}, {_computed(profile)}"
    trained = "" if profile.n_trainable == profile.n_parameters else f" ({profile.n_trainable:,} trained)"
    quantised = f" and {format_bytes(profile.buffer_bytes)} of 4-bit weights" if args.load_in_4bit else ""
    return f"{profile.model}, {profile.n_parameters:,} parameters{trained}{quantised}, {tokens}, {how}"


def _computed(what: ModelProfile | Plan) -> str:
    """How the loss and the moments are computed."""
    moments = f", moments in {what.moment_dtype}" if what.moment_dtype != "float32" else ""
    return ("chunked loss" if what.chunked_loss else "whole logits") + moments


def _about_loss(args: argparse.Namespace, hardware: HardwareProfile) -> str:
    """What chunked loss would need, where only its absence here decided against it."""
    device = torch.device(hardware.device_type)
    if device.type != "cuda" or args.chunked_loss is not None or choose_loss(None, device):
        return ""
    return "\n\n" + wrapped(
        "Planned with whole logits, as training here would go without liger-kernel: --chunked-loss plans for where it "
        "is installed."
    )
