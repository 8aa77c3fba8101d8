"""The data of `protrain train`: what `datasets` reads, in the columns that TRL takes, and packed rows kept apart."""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from torch import nn
from transformers import masking_utils
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from protrain.forward.compilation import replace_attributes
from protrain.profiler.meta_device import as_if_on_gpu

_TEXT = (".txt", ".md")
_BUILDERS = {
    **{".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"},
    **{".parquet": "parquet", ".arrow": "arrow"},
}
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def read_data(options: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The rows to train on and those to evaluate on, or None, with the columns that TRL reads."""
    data, training = options.data, options.training
    template = getattr(training, "chat_template_path", None)
    if template is not None and Path(template).is_file():
        tokenizer.chat_template, training.chat_template_path = Path(template).read_text(encoding="utf-8-sig"), None
    rows = _in_columns_of_trl(load(str(data.dataset_name), data.dataset_config, data.dataset_train_split), tokenizer)
    columns = set(rows.column_names)
    pairs = isinstance(training, trl.DPOConfig)
    if pairs != ({"chosen", "rejected"} <= columns) or not (
        pairs or {"messages", "text", "prompt", "input_ids", getattr(training, "dataset_text_field", "")} & columns
    ):
        raise ValueError(
            f"--data {data.dataset_name}: the columns are {', '.join(sorted(columns))}; `protrain train` reads "
            "messages, conversations, prompt and completion, instruction and output, or text (--dataset_text_field "
            "names another column), and `protrain train dpo` reads chosen and rejected"
        )
    talks = any(isinstance(rows[0].get(column), list) for column in ("messages", "prompt", "chosen"))
    if talks and tokenizer.chat_template is None:
        raise ValueError(
            "the rows are conversations, and the tokenizer of --model has no chat template: give --chat_template_path "
            "FILE.jinja"
        )
    if not pairs and training.assistant_only_loss is None:
        training.assistant_only_loss = "messages" in columns
    if training.eval_strategy == "no":
        return rows, None
    name = str(data.eval_data or data.dataset_name)
    split = data.dataset_train_split if data.eval_data else data.dataset_test_split
    return rows, _in_columns_of_trl(load(name, data.dataset_config, split), tokenizer)


def load(name: str, config: str | None = None, split: str = "train") -> Any:
    """The rows of ``split`` in the file, the folder or the dataset on the Hub with that ``name``.

    Raises:
        ValueError: there are none, or they cannot be read. A broken line of JSON is named.
    """
    path = Path(name)
    files = [each for each in sorted([path, *path.rglob("*")]) if each.is_file() and not each.name.startswith(".")]
    try:
        if any((path / each).exists() for each in ("dataset_info.json", "dataset_dict.json")):
            found = datasets.load_from_disk(name)
            return found[split] if isinstance(found, datasets.DatasetDict) else found
        text = [str(each) for each in files if each.suffix in _TEXT]
        if text and len(text) == len(files):
            return datasets.load_dataset("text", data_files=text, sample_by="document", split="train")
        if path.suffix in _BUILDERS:
            separator = {"sep": "\t"} if path.suffix == ".tsv" else {}
            return datasets.load_dataset(_BUILDERS[path.suffix], data_files=name, split="train", **separator)
        return datasets.load_dataset(name, config, split=split)
    except (ValueError, KeyError, OSError, datasets.exceptions.DatasetsError) as error:
        broken = next(filter(None, map(_broken_line, files)), None)
        raise ValueError(f"the data {name} cannot be read: {broken or error.__cause__ or error}") from error


def _broken_line(file: Path) -> str | None:
    """Where JSON lines are broken, which `datasets` says without the line."""
    if file.suffix in (".jsonl", ".ndjson"):
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    json.loads(line.strip() or "0")
                except ValueError as error:
                    return f"{file}, line {number}, is no JSON: {error}"
    return None


def _in_columns_of_trl(rows: Any, tokenizer: Any) -> Any:
    """``rows`` with messages in place of ShareGPT's conversations, and prompt and completion in place of Alpaca's."""
    columns = set(rows.column_names)
    if "conversations" in columns:

        def messages(row: dict[str, Any]) -> dict[str, Any]:
            said = trl.maybe_convert_to_chatml(row)["messages"]
            return {"messages": [{**each, "role": _ROLES.get(each["role"], each["role"])} for each in said]}

        return rows.map(messages, remove_columns="conversations")
    if {"instruction", "output"} <= columns:
        talks = tokenizer.chat_template is not None

        def completion(row: dict[str, Any]) -> dict[str, Any]:
            question = "\n\n".join(
                str(row[name]) for name in ("instruction", "input") if row.get(name) not in (None, "")
            )
            answer = str(row["output"])
            if not talks:
                return {"prompt": f"{question}\n\n", "completion": answer}
            return {
                "prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": answer}],
            }

        return rows.map(completion, remove_columns=rows.column_names)
    return rows


class PackedRows(DataCollatorForLanguageModeling):
    """TRL's collator for packed rows where attention makes its mask of positions, which begin anew with each example.

    Where no attention of variable lengths is installed, TRL's own would join all rows of a batch to one, of which the
    mask would be as many times as large as there are rows.
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """``input_ids``, ``labels`` and ``position_ids`` of ``examples``, each (rows, tokens of the longest one)."""
        batch: dict[str, Any] = super().torch_call(examples)
        del batch["attention_mask"]  # otherwise nobody would look at the positions
        batch["labels"][batch["position_ids"] == 0] = -100
        return batch


def keeps_rows_apart(model: Any) -> bool:
    """Whether a token of ``model`` sees nothing but its own example, where several are packed into one sequence.

    So it is if a forward asks transformers where examples begin, which none of its attributes says, and no layer is
    recurrent. The parameters of the model are on the meta device.
    """
    if not {"position_ids", "use_cache"} <= inspect.signature(type(model).forward).parameters.keys():
        return False
    asked: list[torch.Tensor] = []
    put_back = replace_attributes([(masking_utils, "find_packed_sequence_indices", asked.append)])
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    try:
        # What fails without values comes after the mask. What fails before it is met by the profile, too.
        with suppress(Exception), torch.no_grad(), as_if_on_gpu():
            model(input_ids=ids, position_ids=torch.arange(4, device="meta").repeat(2)[None], use_cache=False)
    finally:
        put_back()
    convolutions = any(isinstance(module, nn.Conv1d) for module in model.modules())
    recurrent = convolutions or "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    return bool(asked) and not recurrent
