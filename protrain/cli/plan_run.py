"""What `protrain plan` does: it finds out what would be done with a model on a machine, without doing it.

For a machine that is elsewhere, and a step whose profile is kept, it imports neither torch nor transformers. Whatever
needs them is in ``protrain.cli.plan_trace`` and ``protrain.hardware.detection``, which are imported where they are
called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from protrain.cli.imports import importing
from protrain.cli.options import emit, in_options, print_result, write_record
from protrain.cli.plan_machine import machine_of, machines_of
from protrain.cli.plan_picture import check_picture, draw_frontier, draw_timeline
from protrain.cli.plan_step import ProfiledStep
from protrain.cli.plan_text import summary_text, timeline_text
from protrain.cli.shapes import SHAPES
from protrain.common.errors import PlanError
from protrain.common.progress import COUNTED, note, stage
from protrain.common.tables import format_bytes, format_ms, wrapped
from protrain.hardware.profile import HardwareProfile
from protrain.planning import Answer, Plan, compare, explain, frontier, largest, predict, search
from protrain.planning.answer import Machine
from protrain.planning.timeline import Timeline
from protrain.profiler.kept_profiles import counted_profile
from protrain.profiler.model_profile import ModelProfile


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
    profile, inside = None, args.step_during_backward
    try:
        with stage("profiling the model") as show:
            profile = _profile(args, hardware, show=show)
        if args.frontier:
            _frontier(args, profile, hardware)
            return
        with stage("planning"):
            plan = search(profile, hardware, step_during_backward=inside)
            timeline = predict(profile, hardware, plan, step_during_backward=inside).timeline
    except PlanError as error:
        if args.json and not args.frontier:
            print_result(in_options(Answer.refused(error, hardware, profile).to_json()))
        raise
    if args.picture is not None:
        draw_timeline(timeline, f"{profile.model}, {hardware.name}, {plan}: {format_ms(plan.step_ms)}", args.picture)
    with stage("explaining"):
        answer = explain(plan, profile, hardware, step_during_backward=inside, more_memory=args.explain)
    print_result(answer.to_json() if args.json else _text(args, profile, hardware, answer, timeline))
    write_record(plan, args)


def _text(
    args: argparse.Namespace, profile: ModelProfile, hardware: HardwareProfile, answer: Answer, timeline: Timeline
) -> str:
    """The verdict and one step; with --explain what would change it, and the machine."""
    title = wrapped(f"{answer.verdict}\n{_title(args, profile, hardware.world_size)}", indent="  ")
    sections = [f"{title}\n{summary_text(answer)}", f"ONE STEP\n{timeline_text(timeline)}"]
    if not args.explain:
        sections += ["--explain says what would change it, and what is assumed of the machine."]
    else:
        sections += [f"THE PREDICTION, AND WHAT WOULD CHANGE IT\n{answer.table()}"]
        sections += [f"THE MACHINE, AS FAR AS IT IS KNOWN\n{hardware.table()}"]
    return "\n\n".join(sections)


def _frontier(args: argparse.Namespace, profile: ModelProfile, hardware: HardwareProfile) -> None:
    with stage("planning under every limit"):
        found = frontier(profile, hardware, step_during_backward=args.step_during_backward)
    if args.picture is not None:
        draw_frontier(found, args.picture)
    title = wrapped(f"{Machine.of(hardware)}\n{_title(args, profile, hardware.world_size)}", indent="  ")
    emit(found, args, f"{title}\n\n{found.table()}")


def _profile(
    args: argparse.Namespace, hardware: HardwareProfile, layers: int | None = None, *, show: Callable[[str], None]
) -> ModelProfile:
    """Measured here, or counted where the model is to run elsewhere or takes more memory than there is here."""
    step = ProfiledStep.of(args, hardware.device_type, layers)

    def counted() -> ModelProfile:
        with importing():
            from protrain.cli import plan_trace

        return plan_trace.counted(step, device_bytes=hardware.device_bytes, show=show)

    profile = None
    if not (args.hardware or args.compare or args.load_in_4bit):  # 4-bit weights have no values before training
        with importing():
            from protrain.cli import plan_trace

        profile = plan_trace.measured(step, device_bytes=hardware.device_bytes, show=show)
        if profile is None:
            note(COUNTED)
    if profile is None:
        profile = counted_profile(step.description(), counted)
    return replace(profile, accumulation=args.accumulation, moment_dtype=args.moment_dtype)


def _max_model(args: argparse.Namespace, hardware: HardwareProfile) -> None:
    if args.model not in SHAPES:
        raise ValueError(f"--max-model needs a shape that comes at any depth: one of {', '.join(SHAPES)}")
    with stage("looking for the largest depth") as show:
        found = largest(
            lambda layers: _profile(args, hardware, layers, show=lambda part: show(f"{layers} layers: {part}")),
            hardware,
            step_during_backward=args.step_during_backward,
        )
    largest_model = f"the largest model of the width of {args.model}, {_computed(found.plan)}"
    title = wrapped(f"{Machine.of(hardware)}\n{largest_model}", indent="  ")
    emit(found, args, f"{title}\n{in_options(found.table())}")


def _compare(args: argparse.Namespace) -> None:
    machines = machines_of(args)
    largest_device = max(machines.values(), key=lambda machine: machine.device_bytes)
    with stage("profiling the model") as show:
        profile = _profile(args, largest_device, show=show)
    with stage("planning for every machine"):
        found = compare(profile, machines, step_during_backward=args.step_during_backward)
    lines = [_title(args, profile, 1, " and GPU")]
    lines += [f"{name}: {Machine.of(machine)}" for name, machine in machines.items()]
    title = wrapped("\n".join(lines), indent="  ")
    emit(found, args, f"{title}\n\n{found.table()}")


def _title(args: argparse.Namespace, profile: ModelProfile, n_gpus: int, each: str = "") -> str:
    tokens = f"{profile.tokens * profile.accumulation * n_gpus:,} tokens a step{each}"
    how = f"blocks {'compiled' if profile.compiled else 'eager'}, {_computed(profile)}"
    trained = "" if profile.n_trainable == profile.n_parameters else f" ({profile.n_trainable:,} trained)"
    quantised = f" and {format_bytes(profile.buffer_bytes)} of 4-bit weights" if args.load_in_4bit else ""
    return f"{profile.model} of {args.model}, {profile.n_parameters:,} parameters{trained}{quantised}, {tokens}, {how}"


def _computed(what: ModelProfile | Plan) -> str:
    """How the loss and the moments are computed."""
    moments = f", moments in {what.moment_dtype}" if what.moment_dtype != "float32" else ""
    return ("chunked loss" if what.chunked_loss else "whole logits") + moments
