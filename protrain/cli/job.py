"""TrainJob: the options of `protrain train`, kept in the run's folder so that --resume asks for none of them again."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from protrain.cli.lora import parse_lora, refuse_4bit_alone
from protrain.cli.options import DTYPES, LEAST_SEQUENCE, MOMENT_DTYPES, out_of_range
from protrain.cli.run_files import JOB_FILE, PLAN_FILE, RESULTS
from protrain.cli.shapes import SHAPES
from protrain.common.quantities import parse_memory
from protrain.common.records import Record

# The least and the most value of each option. Options with float limits need not be whole numbers. The limits also hold
# for a job.json that was edited.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("batch", "accumulation", "micro_batches", "steps", "threads", "keep"), (1, inf)),
    **dict.fromkeys(("evaluation_batches", "log_every"), (1, inf)),
    **dict.fromkeys(("warmup", "checkpoint_every", "evaluate_every", "sample_tokens"), (0, inf)),
    "sequence": (LEAST_SEQUENCE, inf),
    "seed": (0, 2**64 - 1),  # what random generators take
    "learning_rate": (0.0, 10.0),
    "min_learning_rate": (0.0, 1.0),
    "weight_decay": (0.0, 10.0),
    "clip": (0.0, 1e9),
    "held_out": (0.0, 0.5),
}

LOSS_ON = ("answers", "all")

# Options that may differ when a run is resumed. They change where things live and what is reported, not the training.
MAY_DIFFER = frozenset(
    {
        "device",
        "device_memory",
        "host_memory",
        "plan",
        "step_during_backward",
        "threads",
        "checkpoint_every",
        "keep",
        "evaluate_every",
        "evaluation_batches",
        "sample_tokens",
        "log_every",
        "logger",
        "save_model",
        "merge",
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainJob(Record):
    """The options of one training run. None means that a default depends on the model or the machine."""

    file_kind = "the options of a run of `protrain train`"

    model: str
    from_scratch: bool = False
    data: str | None = None
    column: str | None = None  # of rows; None goes by the names of columns
    chat_template: str | None = None  # a file; None takes that of the tokenizer
    loss_on: str = "answers"  # of rows; text has no questions, so all of it counts
    lora: str | None = None
    load_in_4bit: bool = False
    freeze: tuple[str, ...] = ()
    batch: int = 8
    sequence: int | None = None
    accumulation: int = 1  # batches of a step on each of the GPUs with which the run began
    # Batches of a step on all GPUs, which a run keeps on any number of them. None: it has not begun.
    micro_batches: int | None = None
    steps: int = 400
    learning_rate: float | None = None
    warmup: int | None = None
    min_learning_rate: float = 0.1  # the share of learning_rate at the last step
    weight_decay: float = 0.1  # for matrices; vectors (norms, biases) do not decay
    clip: float = 1.0  # 0 turns clipping off
    dtype: str | None = None
    moment_dtype: str = "float32"
    seed: int = 0
    compile: bool | None = None
    chunked_loss: bool | None = None
    held_out: float = 0.05
    device: str | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    plan: str | None = None
    step_during_backward: bool = False
    threads: int | None = None
    checkpoint_every: int = 500  # 0 means never
    keep: int = 2
    evaluate_every: int = 100  # 0 means only at the end
    evaluation_batches: int = 8
    sample_tokens: int = 200  # 0 means none
    log_every: int = 10
    logger: str | None = None
    save_model: bool = True
    merge: bool = False  # the adapter into the trained model

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and (wrong := out_of_range(value, least, most)):
                raise ValueError(f"{option(name)} {wrong}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype}")
        if self.moment_dtype not in MOMENT_DTYPES:
            raise ValueError(f"--moment-dtype must be {' or '.join(MOMENT_DTYPES)}, not {self.moment_dtype}")
        if self.loss_on not in LOSS_ON:
            raise ValueError(f"--loss-on must be {' or '.join(LOSS_ON)}, not {self.loss_on}")
        for name in ("device_memory", "host_memory"):
            if getattr(self, name) is not None:
                parse_memory(getattr(self, name), name=option(name))
        refuse_4bit_alone(self.lora, load_in_4bit=self.load_in_4bit)
        if self.load_in_4bit and (self.model in SHAPES or self.from_scratch):
            raise ValueError(
                f"--load-in-4bit quantises the weights of a folder, and those of {self.model} are random: leave it out"
            )
        if self.load_in_4bit and self.merge:
            raise ValueError(
                "--merge cannot add the adapter to 4-bit weights: leave it out, and `protrain export FOLDER MERGED "
                "--merge` adds the adapter of the run in FOLDER to the weights of --model, which have 16 bits or more"
            )
        if self.lora is not None:
            parse_lora(self.lora)
            if (self.model in SHAPES or self.from_scratch) and self.save_model and not self.merge:
                raise ValueError(
                    f"--lora trains an adapter for the weights of a folder, and those of {self.model} are random and "
                    "kept nowhere: give --merge to write the whole model, or --no-model"
                )
        elif self.merge:
            raise ValueError("--merge adds an adapter to the model, and there is none without --lora: leave it out")
        if self.clip and self.step_during_backward:
            raise ValueError(
                "--step-during-backward updates before the norm is known: give --clip 0 as well, or drop it"
            )
        if self.dtype == "float16" and self.step_during_backward:
            raise ValueError(
                "--step-during-backward does not go with --dtype float16, whose steps may be skipped: use bfloat16, or "
                "drop it"
            )
        if self.warmup is not None and self.warmup > self.steps:
            raise ValueError(
                f"--warmup {self.warmup} is longer than the run: give at most --steps, which is {self.steps}"
            )

    def peak_learning_rate(self, default: float) -> float:
        """The learning rate after warm-up. Without the option it is ``default``, the model's."""
        return default if self.learning_rate is None else self.learning_rate

    @property
    def warmup_steps(self) -> int:
        """The number of steps of linear warm-up."""
        return min(20, self.steps // 5) if self.warmup is None else self.warmup


def is_run(folder: Path) -> bool:
    """Whether ``folder`` holds a run.

    The job.json of another program is none. One that was edited, or is of another version, is one.
    """
    try:
        options = json.loads((folder / JOB_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    own = {field.name for field in fields(TrainJob)}
    return isinstance(options, dict) and 2 * len(own & options.keys()) > len(own)


def option(name: str) -> str:
    """The command-line spelling of a field."""
    return "--no-model" if name == "save_model" else "--" + name.replace("_", "-")


def start(folder: Path, given: dict[str, Any]) -> TrainJob:
    """The job of a new run in ``folder``.

    Raises:
        ValueError: ``folder`` holds a run already or something that a run would overwrite, or the model is missing.
    """
    if is_run(folder):
        raise ValueError(f"{folder} holds a run already: continue it with --resume, or give another --folder")
    own = [name for name in RESULTS if os.path.lexists(folder / name)]
    if PLAN_FILE in own and Path(given.get("plan", "")).resolve() == (folder / PLAN_FILE).resolve():
        own.remove(PLAN_FILE)  # the run writes the same file
    if own:
        raise ValueError(
            f"{folder} holds {', '.join(own)}, which belongs to no run and would be overwritten: give another "
            "--folder, or move that"
        )
    if given.get("data") is not None and folder.resolve() == Path(given["data"]).resolve():
        raise ValueError(f"--folder {folder} is the folder of the text: give another, or the run would lie in its text")
    if "model" not in given:
        raise ValueError("--model is missing: give a name or a folder, for example --model tiny")
    return TrainJob(**_with_absolute_paths(given))


def resume(folder: Path, given: dict[str, Any]) -> TrainJob:
    """The job of the run in ``folder``, with those options of ``given`` that may differ, and with more steps.

    Raises:
        ValueError: There is no run, or ``given`` holds an option that would change its result.
    """
    if not (folder / JOB_FILE).exists():
        raise ValueError(f"--resume: {folder} holds no run; give the --folder of one")
    job = TrainJob.load(folder / JOB_FILE)
    given = _with_absolute_paths(given)
    for name, value in list(given.items()):
        own = getattr(job, name)
        if name in ("model", "data", "chat_template") and own is not None and own not in SHAPES:
            if _is_moved(own, value):
                continue
            if _is_same_path(own, value):
                given[name] = value = own
        if name == "steps" and value > own:
            continue
        if name not in MAY_DIFFER and value != own:
            own = "the default" if own is None else own
            raise ValueError(
                f"{option(name)} {value} differs from {own} of the run in {folder}; "
                f"leave it out to resume, or start another --folder"
            )
    return replace(job, **given)


def _with_absolute_paths(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with absolute paths of what exists, so that a run can be continued from any working directory."""
    located = dict(given)
    if "freeze" in given:
        located["freeze"] = tuple(given["freeze"])
    for name in ("model", "data", "chat_template", "plan"):
        path = given.get(name)
        is_shape = name == "model" and path in SHAPES
        if path is not None and not is_shape and os.path.exists(path):
            located[name] = str(Path(path).absolute())
    return located


def _is_same_path(own: str, given: str) -> bool:
    """Whether ``given`` is the path ``own``.

    A path that does not exist here may be relative to where the run started.
    """
    if os.path.exists(given):
        return os.path.exists(own) and os.path.samefile(own, given)
    parts = Path(given).parts
    return bool(parts) and Path(own).parts[-len(parts) :] == parts


def _is_moved(own: str, given: str) -> bool:
    """Whether ``given`` may be the new place of the path ``own``. If it is other text, its checksum will differ."""
    return os.path.isabs(given) and os.path.exists(given) and not os.path.exists(own)
