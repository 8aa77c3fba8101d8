"""TrainJob: the options of `protrain train`, kept in the run's folder so that --resume asks for none of them again."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from protrain.cli.loggers import LOGGERS
from protrain.cli.lora import lora_text, refuse_4bit_alone
from protrain.cli.options import memory, number, whole
from protrain.cli.run_files import JOB_FILE, REFUSED_FILE, RESULTS
from protrain.cli.shapes import SHAPES, named
from protrain.common.dtypes import DTYPES, MOMENT_DTYPES
from protrain.common.hub import is_of
from protrain.common.records import Record


def _option(default: Any, help: str, *, spellings: Sequence[str] = (), may_differ: bool = False, **how: Any) -> Any:
    """A field of a TrainJob, which is an option of the command line too.

    Args:
        default: the default of the field.
        help: the help text, to which a default that is a number is added.
        spellings: of the option, if they are not the name of the field alone.
        may_differ: whether the option may be another when a run is resumed, as it never changes the weights.
        how: other arguments of argparse's ``add_argument``. Its ``type`` and ``choices`` also hold for a file.
    """
    if isinstance(default, int | float) and not isinstance(default, bool):
        help += f" (default: {default:g})"
    told = {"help": help, **how}
    return field(default=default, metadata={"told": told, "spellings": spellings, "may_differ": may_differ})


def _whole(default: int | None, help: str, least: int, most: float = math.inf, **how: Any) -> Any:
    """An ``_option`` for a whole number in [least, most]."""
    return _option(default, help, **{"type": whole(least, most), "metavar": "N", **how})


def _number(default: float | None, help: str, least: float, most: float, **how: Any) -> Any:
    """An ``_option`` for a number in [least, most]."""
    return _option(default, help, type=number(least, most), metavar="X", **how)


def _switch(help: str, **how: Any) -> Any:
    """An ``_option`` that is False unless it is given."""
    return _option(False, help, action="store_true", **how)


def _spellings(of: Field[Any]) -> Sequence[str]:
    return of.metadata["spellings"] or (f"--{of.name.replace('_', '-')}",)


@dataclass(frozen=True, kw_only=True)
class TrainJob(Record):
    """The options of one training run. None means that a default depends on the model or the machine.

    Limits and choices also hold for a job.json that was edited.
    """

    file_kind = "the options of a run of `protrain train`"

    model: str = _option(
        MISSING,
        f"a Hugging Face folder, a model of its Hub like org/name, or one of {', '.join(SHAPES)}; a folder goes before "
        "a name of these",
        type=named,
    )
    from_scratch: bool = _switch(
        "begin with random weights, so that a --model folder needs only its config.json and perhaps a tokenizer"
    )
    data: str | None = _option(
        None,
        "text, JSON lines or list, CSV, Parquet, a folder of one of them, or one that save_to_disk of datasets wrote; "
        "or the name of a dataset of the Hugging Face Hub (default for the names of --model: the sources of Python's "
        "library; a folder has none)",
        metavar="PATH|NAME",
    )
    column: str | None = _option(
        None,
        "the column of --data with text or messages (default: the first that there is of messages, conversations, "
        "prompt with completion, instruction with output, and text)",
        metavar="NAME",
    )
    chat_template: str | None = _option(None, "a Jinja template (default: that of the tokenizer)", metavar="FILE")
    loss_on: str = _option(
        "answers",
        "whether the loss counts only answers, in conversations and after prompts, or all tokens (default: answers)",
        choices=("answers", "all"),
    )
    packing: bool = _option(
        True,
        "several rows in a sequence, or each row in one of its own, filled up with padding (default: several)",
        action=argparse.BooleanOptionalAction,
    )
    seed: int = _whole(0, "the seed of random weights, batches and the sample", 0, 2**64 - 1)
    lora: str | None = _option(
        None,
        "train an adapter of peft and no weight of the model: r=16,alpha=32,targets=all-linear,dropout=0, or part of "
        "that; other targets are names of layers, like q_proj+v_proj",
        type=lora_text,
        metavar="NAME=VALUE,...",
    )
    load_in_4bit: bool = _switch("with --lora: hold the weights of the model in 4 bits (QLoRA: NF4 by bitsandbytes)")
    freeze: tuple[str, ...] = _option(
        (),
        "do not train the parameters whose names match, like 'model.embed_tokens.*'; may be given several times",
        action="append",
        metavar="PATTERN",
    )

    batch: int = _whole(8, "sequences in a batch, on each GPU", 1)
    sequence: int | None = _whole(  # each token is learnt from the tokens before it
        None,
        "tokens in a sequence (default: 256 for tiny, else 1024)",
        2,
        metavar="TOKENS",
        spellings=("--sequence", "--seq"),
    )
    accumulation: int = _whole(
        1,
        "batches in a step, on each GPU; resumed on another number of GPUs, a run keeps their number on all together",
        1,
        2**16,  # of rows, the numbers of all batches of a step are in memory
    )
    # Batches of a step on all GPUs, which a run keeps on any number of them. None: it is a new run, and does not go on.
    micro_batches: int | None = _whole(None, "", 1)
    steps: int = _whole(400, "optimizer steps", 1)
    learning_rate: float | None = _number(
        None,
        "the peak learning rate (default: 2e-4 with --lora, 3e-5 for other weights of a folder, 3e-4 for random ones, "
        "and 3e-3 for tiny)",
        0.0,
        10.0,
        spellings=("--learning-rate", "--lr"),
    )
    warmup: int | None = _whole(
        None,
        "steps in which the learning rate rises to its peak, before it falls as a cosine (default: 20, or a fifth of "
        "--steps if that is less)",
        0,
    )
    min_learning_rate: float = _number(0.1, "the learning rate of the last step, as a share of the peak", 0.0, 1.0)
    weight_decay: float = _number(0.1, "the weight decay of matrices; biases and norms have none", 0.0, 10.0)
    clip: float = _number(
        1.0, "the largest norm of the gradient; a larger one is scaled down; 0: no clipping", 0.0, 1e9
    )
    dtype: str | None = _option(
        None, "the type of weights (default: bfloat16 on a GPU, float32 on a CPU)", choices=DTYPES
    )
    moment_dtype: str = _option(
        "float32",
        "the type of Adam's two moments; bfloat16 saves 4 bytes a parameter (default: float32)",
        choices=MOMENT_DTYPES,
    )
    compile: bool | None = _option(
        None,
        "compile the blocks with torch.compile, by which losses differ in their last digits (default: on a GPU)",
        action=argparse.BooleanOptionalAction,
    )
    chunked_loss: bool | None = _option(
        None,
        "compute the loss in pieces, so that logits never exist whole, by which losses differ in their last digits "
        "(default: where it is known to be the same loss)",
        action=argparse.BooleanOptionalAction,
    )

    device: str | None = _option(None, "cuda or cpu (default: cuda if there is a GPU)", may_differ=True)
    device_memory: str | None = _option(
        None,
        "the memory of each GPU to stay within, like 24GiB (default: what is free); with --device cpu, the memory of "
        "a simulated GPU",
        type=memory,
        metavar="SIZE",
        may_differ=True,
    )
    host_memory: str | None = _option(
        None, "the host memory to stay within (default: what is free)", type=memory, metavar="SIZE", may_differ=True
    )
    plan: str | None = _option(
        None, "use the plan that `protrain plan --out FILE` wrote, and search none", metavar="FILE", may_differ=True
    )
    step_during_backward: bool = _switch(
        "update each part of the model inside backward, which takes less host memory; needs --clip 0", may_differ=True
    )
    threads: int | None = _whole(None, "CPU threads (default: torch's choice)", 1, 1024, may_differ=True)

    checkpoint_every: int | None = _whole(
        None,
        "steps between checkpoints; 0: none (default: 500, or a tenth of --steps if that is less)",
        0,
        may_differ=True,
    )
    keep: int = _whole(2, "the number of newest checkpoints to keep", 1, may_differ=True)
    save_model: bool = _option(
        True,
        "do not write the trained model at the end",
        action="store_false",
        spellings=("--no-model",),
        may_differ=True,
    )
    merge: bool = _switch(
        "with --lora: write the whole model with the adapter added, not the adapter alone", may_differ=True
    )
    held_out: float = _number(0.05, "the share of the text or rows that is kept for evaluation", 0.0, 0.5)
    evaluate_every: int = _whole(100, "steps between evaluations; 0: only at the end", 0, may_differ=True)
    evaluation_batches: int = _whole(8, "batches of an evaluation", 1, may_differ=True)
    sample_tokens: int = _whole(200, "tokens to generate at the end; 0: none", 0, may_differ=True)
    logger: str | None = _option(
        None, "log every step there as well; a resumed run continues its curve", choices=LOGGERS, may_differ=True
    )
    log_every: int = _whole(10, "steps between lines of progress where the output is no terminal", 1, may_differ=True)

    def __post_init__(self) -> None:
        for own in fields(self):
            value, told = getattr(self, own.name), own.metadata["told"]
            if value is None:
                continue
            try:
                told.get("type", str)(str(value))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{_spellings(own)[0]} {error}") from None
            if value not in told.get("choices", [value]):
                raise ValueError(f"{_spellings(own)[0]} must be one of {', '.join(told['choices'])}, not {value}")
        is_random = self.model in SHAPES or self.from_scratch
        refuse_4bit_alone(self.lora, load_in_4bit=self.load_in_4bit)
        if self.load_in_4bit and is_random:
            raise ValueError(
                f"--load-in-4bit quantises the weights of a folder, and those of {self.model} are random: leave it out"
            )
        if self.load_in_4bit and self.merge:
            raise ValueError(
                "--merge cannot add the adapter to 4-bit weights: leave it out, and `protrain export FOLDER MERGED "
                "--merge` adds the adapter of the run in FOLDER to the weights of --model, which have 16 bits or more"
            )
        if self.lora is not None and is_random and self.save_model and not self.merge:
            raise ValueError(
                f"--lora trains an adapter for the weights of a folder, and those of {self.model} are random and kept "
                "nowhere: give --merge to write the whole model, or --no-model"
            )
        if self.lora is None and self.merge:
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


_FIELDS = {each.name: each for each in fields(TrainJob)}
# The options that a resumed run may change, by their fields. They change where things live and what is reported.
MAY_DIFFER = {name: _spellings(own)[0] for name, own in _FIELDS.items() if own.metadata["may_differ"]}


def add_options(group: argparse.ArgumentParser | argparse._ArgumentGroup, *names: str, **texts: str) -> None:
    """Add the options for the fields ``names`` of a TrainJob, where ``texts`` have another help text for some.

    An option that is not given has the default of its field, or no value at all if that is the ``argument_default``.
    """
    for name in names:
        own = _FIELDS[name]
        how = {"dest": name, **own.metadata["told"]}
        if name in texts:
            how["help"] = texts[name]
        if group.argument_default != argparse.SUPPRESS:
            how["default"] = [] if own.default == () else own.default  # argparse appends to a list
        group.add_argument(*_spellings(own), **how)


def is_run(folder: Path) -> bool:
    """Whether ``folder`` holds a run.

    The job.json of another program is none. One that was edited, or is of another version, is one.
    """
    try:
        options = json.loads((folder / JOB_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(options, dict) and 2 * len(_FIELDS.keys() & options.keys()) > len(_FIELDS)


def start(folder: Path, given: dict[str, Any]) -> TrainJob:
    """The job of a new run in ``folder``, or of the run there that torchrun starts again as a process has died.

    Such a restart has the same options as the run, but for defaults that the run has settled when it began. torchrun
    also starts a command again that was refused when it was first given, and that is refused for good.

    Raises:
        ValueError: ``folder`` holds a run already or something that a run would overwrite, or the model is missing.
    """
    if is_run(folder):
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and not (folder / REFUSED_FILE).exists():
            job = TrainJob.load(folder / JOB_FILE)
            settled = ("dtype", "compile", "micro_batches", "checkpoint_every", "chunked_loss")
            if job == TrainJob(**{name: getattr(job, name) for name in settled} | _with_absolute_paths(given)):
                return resume(folder, given)
        (folder / REFUSED_FILE).touch()
        raise ValueError(f"{folder} holds a run already: continue it with --resume, or give another --folder")
    plan = Path(given.get("plan", os.devnull)).resolve()  # may be here, as the run writes the same file
    own = [name for name in RESULTS if os.path.lexists(folder / name) and (folder / name).resolve() != plan]
    if own:
        raise ValueError(
            f"{folder} holds {', '.join(own)}, which belongs to no run and would be overwritten: give another "
            "--folder, or move that"
        )
    if "model" not in given:
        raise ValueError("--model is missing: give a name or a folder, for example --model tiny")
    model, data = given["model"], given.get("data")
    if data is None:
        if model not in SHAPES and os.path.isdir(model):
            raise ValueError(f"--data is missing: give the text or the rows that --model {model} is to learn")
    elif not os.path.exists(data):  # before a model is loaded for it
        raise ValueError(f"--data: {data} does not exist")
    elif folder.resolve() == Path(data).resolve():
        raise ValueError(f"--folder {folder} is the folder of the text: give another, or the run would lie in its text")
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
        may_differ = name in MAY_DIFFER or (name == "steps" and value > own)
        if name in ("model", "data", "chat_template") and own not in (None, *SHAPES):
            may_differ = _is_moved(own, value)
            if _is_same_path(own, value):
                given[name] = value = own
        if not may_differ and value != own:
            raise ValueError(
                f"{_spellings(_FIELDS[name])[0]} {value} differs from {'the default' if own is None else own} of the "
                f"run in {folder}; leave it out to resume, or start another --folder"
            )
    return replace(job, micro_batches=job.micro_batches or job.accumulation, **given)


def _with_absolute_paths(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with absolute paths of what exists, so that a run can be continued from any working directory."""
    located = dict(given)
    if "freeze" in given:
        located["freeze"] = tuple(given["freeze"])
    for name in ("model", "data", "chat_template", "plan"):
        path = given.get(name, "")
        if (name != "model" or path not in SHAPES) and os.path.exists(path):
            located[name] = str(Path(path).absolute())
    return located


def _is_same_path(own: str, given: str) -> bool:
    """Whether ``given`` is the path ``own``.

    A path that does not exist here may be relative to where the run started, or be a name on the Hub.
    """
    if os.path.exists(given):
        return os.path.exists(own) and os.path.samefile(own, given)
    parts = Path(given).parts
    return is_of(own, given) or Path(own).parts[-len(parts) :] == parts


def _is_moved(own: str, given: str) -> bool:
    """Whether ``given`` may be the new place of the path ``own``. If it is other text, its checksum will differ."""
    return os.path.isabs(given) and os.path.exists(given) and not os.path.exists(own)
