"""`protrain train`: TRL's SFTTrainer or DPOTrainer on ProTrain, with their options, for data that `datasets` reads.

What the trainers do is theirs: tokens, chat templates, packing, schedules, evaluation, logs. This module chooses
defaults, builds the model without memory for its weights, reads the data, and refuses before the training what would
end it later or train on something else than is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from trl.trainer import dpo_trainer

import protrain
from protrain.checkpoint.tensor_files import used_alone
from protrain.cli.models import read_architecture
from protrain.cli.train_data import PackedRows, keeps_rows_apart, read_data
from protrain.common.cache import on_disk
from protrain.common.errors import warn_user
from protrain.common.progress import print_line
from protrain.forward.compilation import replace_attributes
from protrain.integrations.transformers import ProTrainMixin

_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
_LORA_LEARNING_RATE = 2e-4  # an adapter starts at nothing, and takes larger steps
_EXAMPLE = """`protrain train dpo` trains on chosen and rejected answers, with the options of DPOConfig in place of
those of SFTConfig. Example: protrain train --model org/model --data chat.jsonl --use_peft true --gpus 4"""


class SFT(ProTrainMixin, trl.SFTTrainer):
    """SFTTrainer on ProTrain."""


class DPO(ProTrainMixin, trl.DPOTrainer):
    """DPOTrainer on ProTrain."""


@dataclass
class ModelOptions(trl.ModelConfig):
    """The model, and the adapter that is trained in its place."""

    model_name_or_path: str | None = field(
        default=None, metadata={"aliases": ["--model"], "help": "A folder that save_pretrained wrote, or a Hub name."}
    )
    from_scratch: bool = field(default=False, metadata={"help": "Begin with random weights; the folder needs none."})


@dataclass
class DataOptions(trl.ScriptArguments):
    """The data, and how often a run is started."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "aliases": ["--data"],
            "help": "A file (JSON lines, JSON, CSV, Parquet, Arrow, text), a folder of such or of save_to_disk, "
            "or a Hub name. Rows have messages, conversations, prompt and completion, instruction and output, or text; "
            "for dpo, chosen and rejected.",
        },
    )
    eval_data: str | None = field(
        default=None,
        metadata={"help": "Data to evaluate on, named like --data. The default is the --dataset_test_split of --data."},
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "End after so many evaluations that are no better than the best one."}
    )
    resume: bool = field(
        default=False, metadata={"help": "Go on from the newest checkpoint in --output_dir, with the same options."}
    )
    gpus: int | None = field(default=None, metadata={"help": "GPUs of this machine, for which torchrun is started."})


@dataclass
class WrapOptions:
    """Arguments of ``protrain.wrap``."""

    device_memory: str | None = field(default=None, metadata={"help": "The memory of each GPU to stay within: 24GiB."})
    host_memory: str | None = field(default=None, metadata={"help": "The host memory to stay within."})
    plan: str | None = field(default=None, metadata={"help": "The file of a plan, in place of the search for one."})
    step_during_backward: bool | None = field(
        default=None, metadata={"help": "Update inside backward, for less host memory. Needs --max_grad_norm 0."}
    )
    moment_dtype: str | None = field(
        default=None,
        metadata={"help": "The type of Adam's moments: float32, or bfloat16 for 4 bytes less a parameter."},
    )
    compile: bool | None = field(
        default=None,
        metadata={"help": "Compile the blocks, by which losses differ in their last digits. SFT does so on a GPU."},
    )
    chunked_loss: bool | None = field(
        default=None, metadata={"help": "Compute the loss in pieces. The default is where it is the same loss."}
    )


@dataclass
class Options:
    """What a command line says. ``training`` is an SFTConfig or a DPOConfig."""

    training: Any
    model: ModelOptions
    data: DataOptions
    wrap: WrapOptions


class _Parser(trl.TrlParser):
    """TRL's parser, for which a file may use each name that an option has on the command line, such as data."""

    def set_defaults_with_config(self, **config: Any) -> Any:
        names = {option.lstrip("-"): action.dest for action in self._actions for option in action.option_strings}
        return super().set_defaults_with_config(**{names.get(key, key): config[key] for key in config})


def parse(words: Sequence[str]) -> Options:
    """The options in ``words``, which may begin with sft or dpo, and in the YAML file of --config.

    Raises:
        ValueError: an option is missing, or is none that ProTrain can carry out.
        SystemExit: there is no such option.
    """
    task = words[0] if words[:1] in (["sft"], ["dpo"]) else None
    kind = trl.DPOConfig if task == "dpo" else trl.SFTConfig
    parser = _Parser(
        (ModelOptions, DataOptions, WrapOptions, kind),
        prog=f"protrain train {task or ''}".strip(),
        usage="%(prog)s --model MODEL --data DATA [--config FILE.yaml] [OPTION ...]",
        epilog=_EXAMPLE,
        allow_abbrev=False,
    )
    on_gpu = torch.cuda.is_available()
    parser.set_defaults(
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,  # the plan decides what is recomputed
        logging_nan_inf_filter=False,  # it would wait for the GPU in every micro-batch, and hide a NaN from the log
        accelerator_config={"non_blocking": True},  # a batch is copied while the GPU computes
        save_steps=0.1,  # the part of the run that a crash costs at most
        save_total_limit=2,
        output_dir=None,
        learning_rate=None,
        lora_target_modules=["all-linear"],
        lora_dropout=0.0,
    )
    if task == "dpo":
        parser.set_defaults(precompute_ref_log_probs=None)
    else:  # None: not said, and chosen once model and data are known
        parser.set_defaults(packing=None, assistant_only_loss=None, packing_strategy="bfd_split")
    model, data, wrap, training = parser.parse_args_and_config(list(words[1:] if task else words))
    options = Options(training=training, model=model, data=data, wrap=wrap)
    if model.model_name_or_path is None:
        raise ValueError("--model is missing: give a folder that save_pretrained wrote, or a name on the Hub")
    if data.dataset_name is None:
        raise ValueError("--data is missing: give a file, a folder or a name on the Hub, such as chat.jsonl")
    if model.model_revision != "main" or data.dataset_streaming:
        raise ValueError(
            "`protrain train` takes no --model_revision or --dataset_streaming: give a folder of that revision, or "
            "data that fits the disk"
        )
    if training.optim not in _OPTIMIZERS:
        raise ValueError(
            f"--optim {training.optim.value}: ProTrain has an AdamW of its own, whose states may lie in host memory: "
            "leave the option out; --moment_dtype bfloat16 halves Adam's moments"
        )
    if training.fp16 or model.dtype == "float16":
        raise ValueError(
            "float16 needs its loss scaled, which ProTrain's trainers do not do: leave --fp16 and --dtype out, and the "
            "model is trained in bfloat16, whatever type its files have; or give --bf16 false for float32"
        )
    if task == "dpo":
        if training.precompute_ref_log_probs not in (None, not model.use_peft):
            raise ValueError(
                "--precompute_ref_log_probs is true without an adapter, so that there is no second model in memory, "
                "and false with one: leave it out"
            )
        training.precompute_ref_log_probs = not model.use_peft
    if training.learning_rate is None:
        training.learning_rate = _LORA_LEARNING_RATE if model.use_peft and task != "dpo" else kind.learning_rate
    if training.output_dir == "trainer_output":  # its default
        training.output_dir = f"runs/{Path(model.model_name_or_path).name}"
    return options


def train(options: Options) -> None:
    """Train in this process, which may be one of several.

    Raises:
        ValueError: model, data or folder do not fit the options.
        OSError: another process trains in the folder.
        KeyboardInterrupt: Ctrl-C has ended the training, which is saved.
        SystemExit: another signal has.
    """
    training = options.training
    first = training.process_index == 0
    folder = Path(training.output_dir)
    resume = training.resume_from_checkpoint or options.data.resume
    if not resume and any(folder.glob("checkpoint-*")):
        raise ValueError(f"{folder} holds a run: go on with it by --resume true, or give another --output_dir")
    with training.main_process_first(local=False):
        name = on_disk(str(options.model.model_name_or_path), weights=not options.model.from_scratch)
        architecture = read_architecture(name)
        if architecture.folder is None:
            raise ValueError(
                f"--model {name}: a shape has no tokenizer, so give a folder or a name on the Hub; "
                "examples/pretrain.py trains a shape on bytes"
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        rows, evaluation = read_data(options, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with used_alone(folder, "wait for it, or give another --output_dir") if first else nullcontext():
        transformers.utils.logging.disable_progress_bar()  # of each save; those of the training are the Trainer's
        transformers.set_seed(training.seed)  # that of an adapter's start values
        try:
            trainer = _trainer(options, name, architecture.model, tokenizer, rows, evaluation)
        except (RuntimeError, ValueError) as error:
            if "{% generation %}" not in str(error):
                raise
            raise ValueError(
                f"--data {options.data.dataset_name}: {error} Give --chat_template_path FILE.jinja with "
                "{% generation %} and {% endgeneration %} around the assistant's words (TRL has such files in its "
                "folder chat_templates), or --assistant_only_loss false to train on all words, those of the user too"
            ) from None
        if first:
            _describe(trainer, options.data.dataset_name, rows)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        print_line(f"the trained {'adapter' if options.model.use_peft else 'model'} is in {folder}")


def _trainer(options: Options, name: str, model: Any, tokenizer: Any, rows: Any, evaluation: Any) -> Any:
    """The trainer of a model like the empty ``model``, with weights that are read when it is wrapped."""
    training, model_options = options.training, options.model
    pairs = isinstance(training, trl.DPOConfig)
    in_bf16 = training.bf16 or model_options.dtype == "bfloat16"
    model_options.dtype = "bfloat16" if in_bf16 else "float32"  # in which 4-bit layers compute
    apart = pairs or keeps_rows_apart(model)
    arguments = {key: value for key, value in vars(options.wrap).items() if value is not None}
    # TRL does not compile the reference of a pair, from which a compiled model would differ before the first step.
    arguments.setdefault("compile", training.torch_compile or not (pairs or training.use_cpu))
    how = {"dtype": model_options.dtype, "attn_implementation": model_options.attn_implementation}
    quantised = trl.get_quantization_config(model_options)
    if quantised is None:
        with protrain.empty_parameters():
            model = transformers.AutoModelForCausalLM.from_config(model.config, **how)
        if not model_options.from_scratch:
            arguments["weights"] = name
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            name, device_map={"": training.device}, quantization_config=quantised, **how
        )
        for layer in model.modules():
            # Otherwise an evaluation on some CPUs packs 4-bit weights for good, so that no training could follow it.
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False
    if (Path(name) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(name)
    if not pairs and training.packing is None:
        training.packing = apart
    packing = not pairs and training.packing
    if packing and not apart:
        warn_user("--packing true: examples of one sequence see each other in this model")
    has_flash = transformers.utils.is_flash_attn_2_available() and in_bf16 and model._supports_flash_attn
    if packing and has_flash and model_options.attn_implementation is None:
        model.set_attn_implementation("flash_attention_2")
    patience = options.data.early_stopping_patience
    with ExitStack() as stack:
        if quantised is None and model_options.use_peft:
            stack.enter_context(protrain.empty_parameters())
        if pairs:
            # TRL keeps answers of a reference under a checksum of its weights, which an empty model has in files.
            files = [(path.name, path.stat().st_mtime_ns) for path in sorted(Path(name).glob("*.safetensors"))]
            weights = repr((name, files, model_options.from_scratch, training.seed))
            stack.callback(replace_attributes([(dpo_trainer, "hash_module", lambda _: weights)]))
        trainer = (DPO if pairs else SFT)(
            model=model,
            args=training,
            train_dataset=rows,
            eval_dataset=evaluation,
            processing_class=tokenizer,
            peft_config=trl.get_peft_config(model_options),
            callbacks=[transformers.EarlyStoppingCallback(patience)] if patience else None,
            protrain=arguments,
        )
    if packing and "flash" not in (model.config._attn_implementation or ""):
        trainer.data_collator = PackedRows(  # to one length, for which the blocks are compiled once
            tokenizer.pad_token_id, return_position_ids=True, pad_to_multiple_of=training.max_length
        )
    return trainer


def _describe(trainer: Any, name: Any, rows: Any) -> None:
    """Say what is trained on: rows, tokens and passes."""
    import pyarrow.compute as compute

    columns = [each for each in trainer.train_dataset.column_names if each.endswith("_ids")]
    tables = trainer.train_dataset.select_columns(columns).with_format("arrow").iter(1000)
    tokens = sum(
        compute.sum(compute.list_value_length(table[each])).as_py() or 0 for table in tables for each in columns
    )
    steps = trainer.args.max_steps
    length = f"steps: {steps}" if steps > 0 else f"passes: {trainer.args.num_train_epochs:g}"
    print_line(f"{name}: {len(rows):,} rows, {tokens:,} tokens in {len(trainer.train_dataset):,} sequences, {length}")
