"""Fine-tunes a chat model with LoRA by TRL's SFTTrainer, which one class statement puts on ProTrain.

python examples/sft_lora.py                                                  # a tiny model and made-up chats
python examples/sft_lora.py --model path/to/model --chats path/to/chats.jsonl
torchrun --nproc-per-node 4 examples/sft_lora.py --model path/to/model --chats path/to/chats.jsonl

A line of the file is {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from protrain.integrations.transformers import ProTrainMixin

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"


class SFT(ProTrainMixin, SFTTrainer):
    """SFTTrainer on ProTrain."""


def made_up_chats() -> Dataset:
    """Questions for the word that follows another in a list."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    chats = [
        [{"role": "user", "content": f"What follows {word}?"}, {"role": "assistant", "content": following}]
        for word, following in pairwise(words)
    ]
    return Dataset.from_list([{"messages": chat} for chat in chats * 10])


def tiny(chats: Dataset) -> tuple[Any, Any]:
    """A small model with random weights, and a tokenizer trained on the chats."""
    learner = ByteLevelBPETokenizer()
    texts = [message["content"] for chat in chats for message in chat["messages"]]
    learner.train_from_iterator(texts, vocab_size=320, special_tokens=["<pad>", "<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learner._tokenizer, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    return AutoModelForCausalLM.from_config(config), tokenizer


def main(arguments: list[str] | None = None) -> Any:
    """Train, and return the trainer."""
    parser = argparse.ArgumentParser(description="Fine-tune a chat model with LoRA by TRL's SFTTrainer on ProTrain.")
    parser.add_argument("--model", type=Path, help="folder of a model; by default a tiny one is made")
    parser.add_argument("--chats", type=Path, help="file of chats, one JSON object a line; by default they are made up")
    parser.add_argument("--folder", type=Path, default=Path("runs/sft"), help="where checkpoints and adapters go")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device-memory", help='GPU memory to stay within, such as "24GiB"')
    options = parser.parse_args(arguments)

    chats = Dataset.from_json(str(options.chats)) if options.chats else made_up_chats()
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    else:
        model, tokenizer = tiny(chats)
    trainer = SFT(
        model=model,
        args=SFTConfig(
            output_dir=str(options.folder),
            max_steps=options.steps,
            learning_rate=1e-2 if options.model is None else 2e-4,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,  # the plan decides what is recomputed
            logging_steps=10,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=chats,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        protrain={"device_memory": options.device_memory},
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
