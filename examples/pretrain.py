"""Trains a language model from random weights, in a plain PyTorch loop around ``protrain.wrap``.

python examples/pretrain.py                                      # a tiny model, on the sources of Python's library
python examples/pretrain.py --data book.txt --device-memory 40MiB
torchrun --nproc-per-node 2 examples/pretrain.py --micro-batches 2

The tokens are the bytes of the text. The same command again goes on after the newest checkpoint in the folder. The
weights are the same bits for every --device-memory, for every number of processes that divides --micro-batches, and
whether or not the training was interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import protrain

BATCH, SEQUENCE = 8, 256  # rows of a micro-batch, and tokens of a row
TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    max_position_embeddings=SEQUENCE,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)


def read_text(path: Path | None) -> np.ndarray:
    """The bytes of a file, or of the sources of Python's library."""
    if path is not None:
        return np.fromfile(path, dtype=np.uint8)
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(each for folder in (".", "asyncio", "email", "json") for each in library.glob(f"{folder}/*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def batch_of(text: np.ndarray, number: int) -> dict[str, Tensor]:
    """Micro-batch ``number`` of the training: (BATCH, SEQUENCE) token ids.

    The number alone decides what is in it, so it does not matter which process computes it, or after which restart.
    """
    starts = np.random.default_rng(number).integers(len(text) - SEQUENCE + 1, size=BATCH)
    rows = torch.from_numpy(np.stack([text[start : start + SEQUENCE] for start in starts])).long()
    return {"input_ids": rows, "labels": rows}  # the model itself shifts the labels by one token


def learning_rate(step: int, steps: int) -> float:
    """A share of the peak: a linear warm-up, and then a cosine that falls to a tenth."""
    warmup = min(20, steps // 5)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def draw(losses: list[float], path: Path) -> None:
    """Write the loss of every step, and the mean of each twenty steps, as a picture."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(layout="constrained")).add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, alpha=0.3)
    means = [sum(losses[at - 20 : at]) / 20 for at in range(20, len(losses) + 1, 20)]
    axes.plot(range(10, len(losses) - 9, 20), means, "o-")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of every step."""
    parser = argparse.ArgumentParser(description="Train a tiny language model on text with ProTrain.")
    parser.add_argument("--data", type=Path, help="a file of text; by default the sources of Python's library")
    parser.add_argument("--folder", type=Path, default=Path("runs/pretrain"), help="for checkpoints, curve and model")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step, on all processes together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device-memory", default="60MiB", help="memory to stay within; a CPU simulates a GPU's")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    options = parser.parse_args(arguments)
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets them
    accumulation, rest = divmod(options.micro_batches, processes)
    if rest or not accumulation:
        parser.error(f"--micro-batches {options.micro_batches} must be a multiple of {processes}, which are processes")

    text = read_text(options.data)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TINY)
    model, optimizer = protrain.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1),
        example_batch=batch_of(text, 0),
        device=options.device,
        device_memory=options.device_memory,
        accumulation=accumulation,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options.steps))
    checkpoints, losses = options.folder / "checkpoints", list[float]()
    if checkpoints.exists():
        losses = protrain.load_checkpoint(checkpoints, model, optimizer, scheduler=schedule)

    began_s, done = time.perf_counter(), len(losses)
    for step in range(done, options.steps):
        parts = []
        for turn in range(accumulation):  # micro-batch i of a step belongs to process i mod W
            batch = batch_of(text, step * options.micro_batches + turn * processes + rank)
            loss = model(**{name: rows.to(options.device) for name, rows in batch.items()}).loss / accumulation
            loss.backward()
            parts.append(loss.detach())
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total = torch.stack(parts).sum()
        if processes > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total) / processes)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            protrain.save_checkpoint(checkpoints, model, optimizer, scheduler=schedule, extra=losses)
        if rank == 0 and (step + 1) % 10 == 0:
            tokens = (step + 1 - done) * options.micro_batches * BATCH * SEQUENCE
            speed = tokens / (time.perf_counter() - began_s)
            print(f"step {step + 1}/{options.steps}  loss {losses[-1]:.3f}  {speed:,.0f} tokens/s", flush=True)

    if rank == 0:
        shutil.rmtree(options.folder / "model", ignore_errors=True)  # of a shorter training
    protrain.export(model, options.folder / "model")  # for AutoModelForCausalLM.from_pretrained
    if rank == 0:
        (options.folder / "losses.json").write_text(json.dumps(losses))
        draw(losses, options.folder / "loss.png")
        print(optimizer.report())
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {options.folder} has model/, loss.png and checkpoints/")
    return losses


if __name__ == "__main__":
    main()
