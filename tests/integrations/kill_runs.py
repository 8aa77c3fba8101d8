"""A training of two ranks that may be killed at any moment, and goes on from its newest whole checkpoint."""

from __future__ import annotations

import faulthandler
import signal
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from protrain.common.errors import CheckpointError
from protrain.integrations.transformers import ProTrainTrainer
from tests.engine.profiles import share_profiles
from tests.integrations.clients import LLAMA

STEPS = 24
SAVED = 3  # steps between checkpoints
ROWS, TOKENS = 64, 16
FINAL = "final.pt"


def train_on(rank: int, size: int, folder: str) -> None:
    """Train to the end, from the newest whole checkpoint if there is one. The first rank keeps the final weights."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    share_profiles(pytest.MonkeyPatch())
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, attention_dropout=0.1, use_cache=False))
    rows = torch.randint(0, LLAMA["vocab_size"], (ROWS, TOKENS), generator=torch.Generator().manual_seed(1)).tolist()
    trainer = ProTrainTrainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            save_steps=SAVED,
            save_total_limit=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        protrain={"device_memory": "1MiB"},
    )
    found = any(Path(folder).glob("checkpoint-*"))
    print("begun", flush=True)
    try:
        trainer.train(resume_from_checkpoint=found or None)
    except CheckpointError as error:  # the only one was not saved to its end
        print(f"from the start: {error}", flush=True)
        trainer.train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(weights, Path(folder, FINAL))
    print("done", flush=True)
