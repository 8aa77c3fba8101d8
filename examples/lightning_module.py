"""Trains a LightningModule on ProTrain, which is a matter of the Trainer's strategy.

python examples/lightning_module.py                                   # a tiny model and made-up text
python examples/lightning_module.py --model path/to/model             # the text's bytes are its tokens here as well
torchrun --nproc-per-node 4 examples/lightning_module.py --model path/to/model
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

from protrain.integrations.lightning import ProTrainStrategy

SEQUENCE = 64
TINY = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)


class LanguageModel(lightning.LightningModule):
    """As any LightningModule: nothing in it is about ProTrain."""

    def __init__(self, folder: Path | None, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        if folder is None:
            self.model = AutoModelForCausalLM.from_config(TINY)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(folder)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch of tokens."""
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.1)


def rows() -> TensorDataset:
    """A text that counts, as rows of bytes."""
    tokens = torch.tensor(list(" ".join(map(str, range(5000))).encode()))
    return TensorDataset(tokens[: len(tokens) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE))


def main(arguments: list[str] | None = None) -> Any:
    """Train, and return the trainer."""
    parser = argparse.ArgumentParser(description="Train a LightningModule on ProTrain.")
    parser.add_argument("--model", type=Path, help="folder of a model; by default a tiny one is made")
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"), help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device-memory", help='GPU memory to stay within, such as "24GiB"')
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        strategy=ProTrainStrategy(device_memory=options.device_memory),
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        max_steps=options.steps,
        gradient_clip_val=1.0,
        default_root_dir=options.folder,
        logger=False,
    )
    module = LanguageModel(options.model, learning_rate=1e-3 if options.model is None else 2e-5)
    trainer.fit(module, DataLoader(rows(), batch_size=8, shuffle=True))
    return trainer


if __name__ == "__main__":
    main()
