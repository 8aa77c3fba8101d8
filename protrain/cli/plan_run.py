"""What `protrain plan` does: it finds out what would be done with a model on a machine, without doing it.

For a machine that is elsewhere, and a step whose profile is kept, it imports neither torch nor transformers. Whatever
needs them is in ``protrain.cli.plan_trace`` and ``protrain.hardware.detection``, which are imported where they are
called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, cached_property, partial
from importlib.util import find_spec
from typing import Any

from protrain.cli.options import emit, need, print_result, write_record
from protrain.cli.plan_machine import machine_of, machines_of, other_machines
from protrain.cli.plan_shown import draw_timeline, summary_text, timeline_text
from protrain.cli.plan_step import ProfiledStep
from protrain.cli.shapes import SHAPES
from protrain.common.errors import PlanError
from protrain.common.progress import COUNTED, heard, print_line, stage
from protrain.common.tables import format_bytes, format_ms, wrapped
from protrain.hardware.profile import HardwareProfile
from protrain.planning import Answer, Comparison, Models, Plan, explain, fastest_batches, largest, search
from protrain.planning.answer import Alternative, Job, Machine
from protrain.planning.prose import counted
from protrain.profiler.kept_profiles import kept, key_of
from protrain.profiler.model_profile import ModelProfile

_COUNTED_BATCHES = 8, 16  # which are counted if --batch is not given
_ASKED = ("batch", "accumulation", "step_tokens", "moment_dtype", "tokens", "price", "step_during_backward")


def run(args: argparse.Namespace) -> None:
    """Run `protrain plan`."""
    if args.picture is not None:
        if args.max_model or args.compare:
            raise ValueError("--picture shows a step of one plan: leave out --max-model and --compare")
        need("matplotlib", "--picture", extra="hf")
    if args.step_during_backward and args.dtype == "float16":
        raise ValueError("--step-during-backward does not work with float16, as `wrap` says: use --dtype bfloat16")
    if args.batch is None and args.accumulation is not None:
        raise ValueError("--accumulation says how many batches a step has: give --batch too, or --step-tokens alone")
    if args.compare is not None:
        _compare(args)
        return
    asked = _Asked(args, machine_of(args))
    if args.max_model:
        _max_model(asked)
    else:
        _plan(asked)


class _Asked:
    """What ``args`` ask for on a machine whose GPUs have the profile ``hardware``."""

    def __init__(self, args: argparse.Namespace, hardware: HardwareProfile, instead_of: _Asked | None = None) -> None:
        self.args = args
        self.hardware = hardware
        self.step = ProfiledStep.of(args, hardware.device_type)
        # What profiles say beside what is traced.
        self._training = {name: getattr(args, name) for name in ("moment_dtype", "step_during_backward")}
        # A simulated device takes one sequence: a step of so many tokens would take a CPU hours.
        self._batch_is_open = args.batch is None and hardware.device_type != "cpu"
        self._elsewhere = bool(args.hardware or args.compare)
        # An alternative runs nothing here: it takes what was counted, or measured for this machine, for the question.
        self._measures = not self._elsewhere and instead_of is None
        self._counted: dict[ProfiledStep, ModelProfile] = {} if instead_of is None else instead_of._counted
        self._measured: dict[ProfiledStep, ModelProfile] = {}
        if instead_of is not None and not self._elsewhere:
            self._measured = instead_of._measured
        self.profile = cache(self._profile)  # by the sequences and the number of the batches of a step

    def counted(self, step: ProfiledStep) -> ModelProfile:
        """The profile of ``step`` from the shapes of its tensors."""

        def count() -> ModelProfile:
            from protrain.cli import plan_trace

            return plan_trace.counted(step)

        if step not in self._counted:
            self._counted[step] = kept("profiles", ModelProfile, key_of(step.description()), count)
        return replace(self._counted[step], **self._training)

    def _profile(self, batch: int, accumulation: int) -> ModelProfile:
        """Measured here, or counted where the model is to run elsewhere or takes more memory than there is here."""
        step = replace(self.step, batch=batch)
        if self._measures and not step.load_in_4bit:  # 4-bit weights have no values before training
            self._measure(step)
        profile = self._measured.get(step)
        if profile is None and self._batch_is_open:
            return self.derived(batch)
        if profile is None:
            with stage("profiling the model"):
                profile = self.counted(step)
        return replace(profile, accumulation=accumulation, **self._training)

    def _measure(self, step: ProfiledStep) -> None:
        from protrain.cli import plan_trace

        with stage("profiling the model") as show:
            profile = plan_trace.measured(step, device_bytes=self.hardware.device_bytes, show=show)
        if profile is None:
            print_line(COUNTED)
        else:
            self._measured[step] = profile

    @cached_property
    def _traced(self) -> list[ModelProfile]:
        """Counted profiles of two batches, from which those of all others follow.

        Gradients, masks and what 4-bit weights are unpacked into do not grow with the batch.
        """
        with stage("profiling two batches"):
            return [self.counted(replace(self.step, batch=batch)) for batch in _COUNTED_BATCHES]

    @cached_property
    def n_sequences(self) -> int:
        """The sequences of a step of --step-tokens on each GPU."""
        known = self._traced[0]
        return self.args.step_tokens * known.n_sequences // (known.tokens * self.hardware.world_size) or 1

    def derived(self, batch: int) -> ModelProfile:
        """The profile of so many sequences in a step of --step-tokens."""
        known, other = self._traced
        return replace(known.at_batch(batch, other), accumulation=self.n_sequences // batch)

    @cached_property
    def batches(self) -> list[int]:
        """The batches that fit, of those that were compared for --step-tokens, the fastest first."""
        if not self._batch_is_open:
            return []
        with stage("comparing batches"):
            return fastest_batches(
                self.derived,
                self.hardware,
                first=_COUNTED_BATCHES[0],
                n_sequences=self.n_sequences,
            )

    def profiles(self) -> Iterator[ModelProfile]:
        """The profile of --batch, or of the batches for --step-tokens, the fastest first, which may turn out too large.

        If none of these fits, it is that of one sequence.
        """
        if not self._batch_is_open:
            yield self.profile(self.step.batch, self.args.accumulation or 1)
            return
        for batch in self.batches or [1]:
            yield self.profile(batch, self.n_sequences // batch)

    def kept(self, what: str, make: Callable[[], Answer]) -> Answer:
        """What ``make`` answers. It is kept for a machine that is elsewhere, as the free memory of this one changes."""
        if not self._elsewhere:
            return make()
        facts = [what, *(getattr(self.args, name) for name in _ASKED), self.step.description(), self.hardware.to_dict()]
        return kept("answers", Answer, key_of(facts), make)


def _answer(asked: _Asked, price: float | None) -> Answer:
    """Whether the model fits, how fast it is, and what limits it."""
    for profile in asked.profiles():
        try:
            with stage("planning"):
                plan = search(profile, asked.hardware)
                answer = explain(plan, profile, asked.hardware)
                break
        except PlanError as error:
            answer = Answer.refused(error, profile, asked.hardware)
    return replace(answer, job=Job(tokens=asked.args.tokens, price=price))


def _plan(asked: _Asked) -> None:
    args, hardware = asked.args, asked.hardware
    answer = asked.kept("plan", partial(_answer, asked, _prices(args, 1)[0]))
    profile = asked.profile(answer.n_sequences, answer.accumulation)
    if not args.json:  # each part is printed as soon as it is known
        fits = "fits on" if answer.fits else "does not fit"
        title = wrapped(f"{fits} {answer.machine}\n{_title(args, profile, hardware.world_size)}", indent="  ")
        print_result(f"{title}\n{summary_text(answer)}")
    if answer.plan is not None:
        timeline = Models.of(answer.plan, profile, hardware).timeline(answer.plan.block_modes, answer.plan.counts)
        if not args.json:
            print_result(f"\nONE STEP\n{timeline_text(timeline)}")
    answer = asked.kept("instead", partial(_with_alternatives, asked, answer))
    print_result(answer.to_json() if args.json else _more_text(args, hardware, answer))
    if answer.plan is None:
        raise ValueError(f"{answer.verdict} {answer.nearest()}")
    write_record(answer.plan, args)
    if args.picture is not None:
        title = f"{profile.model}, {hardware.name}, {answer.plan}: {format_ms(answer.plan.step_ms)}"
        draw_timeline(timeline, title, args.picture)


def _more_text(args: argparse.Namespace, hardware: HardwareProfile, answer: Answer) -> str:
    """What would fit or be faster, and with --explain what would change the plan, and the machine."""
    if answer.fits and args.explain:
        prediction = f"THE PREDICTION, AND WHAT WOULD CHANGE IT\n{answer.table()}"
        return f"\n{prediction}\n\nTHE MACHINE, AS FAR AS IT IS KNOWN\n{hardware.table()}"
    hint = "\n\n--explain says what each number would change, and what is assumed of the machine."
    return f"\n{answer.alternatives_table()}{hint if answer.fits else ''}"


def _with_alternatives(asked: _Asked, answer: Answer) -> Answer:
    """``answer`` with those to the questions that differ from ``asked`` in one thing."""
    changes = [*_other_steps(asked, answer), *other_machines(asked.args, asked.hardware, answer)]
    found = []
    with stage("looking for what would be better") as show:
        for what, changed in changes:
            options = " ".join(_option(name, value) for name, value in changed.items())
            show(options)
            args = argparse.Namespace(**{**vars(asked.args), **changed})
            with heard(False):
                other = _Asked(args, machine_of(args), instead_of=asked)
                plan = other.kept("plan", partial(_answer, other, answer.job.price)).plan
            found.append(Alternative(what=f"{what} ({options})" if what else options, plan=plan))
    return replace(answer, alternatives=tuple(found))


def _option(name: str, value: object) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option} {value}"


def _other_steps(asked: _Asked, answer: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other batches, narrower moments, and LoRA and QLoRA unless all states are on the device anyway.

    Each has a name, "" if its options say enough, and the options that differ.
    """
    step = asked.step
    for batch in asked.batches:
        if batch != answer.n_sequences:
            yield "", {"batch": batch, "accumulation": asked.n_sequences // batch}
    if asked.args.batch is not None:
        batch = 2 * step.batch if answer.fits else answer.fitting_batch or step.batch // 2
        if batch:
            yield "", {"batch": batch}
    if asked.args.moment_dtype == "float32":
        yield "bf16 moments", {"moment_dtype": "bfloat16"}
    if answer.plan is None or answer.plan.n_persist < answer.plan.n_chunks:
        adapter = step.lora or "r=16"
        if step.lora is None and find_spec("peft"):
            yield "LoRA", {"lora": adapter}
        if not step.load_in_4bit and find_spec("peft") and find_spec("bitsandbytes"):
            yield "QLoRA", {"lora": adapter, "load_in_4bit": True}


def _max_model(asked: _Asked) -> None:
    args = asked.args
    if args.model not in SHAPES:
        raise ValueError(f"--max-model needs a shape that comes at any depth: one of {', '.join(SHAPES)}")
    with stage("looking for the largest depth"):
        found = largest(
            lambda layers: replace(
                asked.counted(replace(asked.step, layers=layers)), accumulation=args.accumulation or 1
            ),
            asked.hardware,
        )
    largest_model = f"the largest model of the width of {args.model}, {_computed(found.plan)}, batch {asked.step.batch}"
    title = wrapped(f"{Machine.of(asked.hardware)}\n{largest_model}", indent="  ")
    emit(found, args, f"{title}\n{found.table()}")


def _compare(args: argparse.Namespace) -> None:
    machines = machines_of(args)
    answers = {}
    for (name, hardware), price in zip(machines.items(), _prices(args, len(machines)), strict=True):
        asked = _Asked(args, hardware)
        answers[name] = asked.kept("plan", partial(_answer, asked, price))
    found = Comparison.of(answers)
    title = "\n".join(f"{name}: {answer.machine}" for name, answer in found.machines.items())
    emit(found, args, f"{wrapped(title, indent='  ')}\n\n{found.table()}")


def _prices(args: argparse.Namespace, n_machines: int) -> list[float | None]:
    """The price of a GPU of each machine: one for all of them, or as many as there are."""
    prices: list[float | None] = [*args.price] if args.price else [None]
    if len(prices) not in (1, n_machines):
        raise ValueError(
            f"--price has {counted(len(prices), 'price')} for {counted(n_machines, 'machine')}: give one for all, or "
            "one for each"
        )
    return prices * n_machines if len(prices) == 1 else prices


def _title(args: argparse.Namespace, profile: ModelProfile, n_gpus: int) -> str:
    tokens = f"{profile.tokens * profile.accumulation * n_gpus:,} tokens a step"
    how = f"blocks {'compiled' if profile.compiled else 'eager'}, {_computed(profile)}"
    trained = "" if profile.n_trainable == profile.n_parameters else f" ({profile.n_trainable:,} trained)"
    quantised = f" and {format_bytes(profile.buffer_bytes)} of 4-bit weights" if args.load_in_4bit else ""
    return f"{profile.model} of {args.model}, {profile.n_parameters:,} parameters{trained}{quantised}, {tokens}, {how}"


def _computed(what: ModelProfile | Plan) -> str:
    """How the loss and the moments are computed."""
    moments = f", moments in {what.moment_dtype}" if what.moment_dtype != "float32" else ""
    return ("chunked loss" if what.chunked_loss else "whole logits") + moments
