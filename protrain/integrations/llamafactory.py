"""LLaMA-Factory on ProTrain.

python -m protrain.integrations.llamafactory train config.yaml

LLaMA-Factory loads the model on the GPU, which may be too small for all of it, unless ``low_cpu_mem_usage`` is false.
"""

from __future__ import annotations

import importlib
import sys

from protrain.integrations.transformers import on_protrain

# The Trainer of each kind of training. Some workflows import it when the module is imported, and others when they run.
_TRAINERS = {
    "pt": "CustomTrainer",
    "sft": "CustomSeq2SeqTrainer",
    "dpo": "CustomDPOTrainer",
    "kto": "CustomKTOTrainer",
    "rm": "PairwiseTrainer",
}


def main() -> None:
    """Train as ``llamafactory-cli train`` does, on ProTrain."""
    if sys.argv[1:2] != ["train"] or len(sys.argv) < 3:
        raise SystemExit("usage: python -m protrain.integrations.llamafactory train CONFIG [NAME=VALUE ...]")
    sys.argv[1:3] = [sys.argv[2], "low_cpu_mem_usage=false"]
    if sys.argv[1].startswith("--"):  # all options stand in the command, and there is no file
        sys.argv[1:3] = ["--low_cpu_mem_usage", "false", sys.argv[1]]
    for kind, name in _TRAINERS.items():
        for part in ("trainer", "workflow"):
            module = importlib.import_module(f"llamafactory.train.{kind}.{part}")
            if hasattr(module, name):
                setattr(module, name, on_protrain(getattr(module, name)))
    from llamafactory.train.tuner import run_exp

    run_exp()


if __name__ == "__main__":
    main()
