"""Fine-tunes all parameters of a causal language model with transformers' Trainer, on GPUs that it need not fit.

python examples/trainer.py                                             # a tiny model and made-up text
python examples/trainer.py --model path/to/model --text path/to/text   # a folder with safetensors and tokenizer
torchrun --nproc-per-node 4 examples/trainer.py --model path/to/model --text path/to/text
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, TrainingArguments

import protrain
from protrain.integrations.transformers import ProTrainTrainer

TINY = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
)  # one token for every byte


def made_up_text() -> str:
    """Sums, one a line."""
    pairs = random.Random(0).choices(range(100), k=2000)
    return "".join(f"{a} + {b} = {a + b}\n" for a, b in zip(pairs[::2], pairs[1::2], strict=True))


def main(arguments: list[str] | None = None) -> Any:
    """Train, and return the trainer."""
    parser = argparse.ArgumentParser(description="Fine-tune all parameters with transformers' Trainer on ProTrain.")
    parser.add_argument("--model", type=Path, help="folder of a model; by default a tiny one is made")
    parser.add_argument("--text", type=Path, help="file of text; by default sums are made up")
    parser.add_argument("--folder", type=Path, default=Path("runs/trainer"), help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sequence", type=int, default=128, help="tokens in a row")
    parser.add_argument("--device-memory", help='GPU memory to stay within, such as "24GiB"')
    options = parser.parse_args(arguments)

    text = options.text.read_text() if options.text else made_up_text()
    wrap_arguments = {"device_memory": options.device_memory}
    torch.manual_seed(0)
    if options.model:
        with protrain.empty_parameters():  # the model never exists whole
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model))
        wrap_arguments["weights"] = str(options.model)
        tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"]
    else:
        model = AutoModelForCausalLM.from_config(TINY)
        tokens = list(text.encode())
    rows = [tokens[at : at + options.sequence] for at in range(0, len(tokens) - options.sequence, options.sequence)]
    trainer = ProTrainTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.folder),
            max_steps=options.steps,
            learning_rate=1e-3 if options.model is None else 2e-5,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            logging_steps=10,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        protrain=wrap_arguments,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
