"""LLaMA-Factory on ProTrain.

python -m protrain.integrations.llamafactory train config.yaml
"""

from __future__ import annotations

import importlib
import sys

from protrain.integrations.any_trainer import on_protrain

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
    del sys.argv[1]
    for kind, name in _TRAINERS.items():
        for part in ("trainer", "workflow"):
            module = importlib.import_module(f"llamafactory.train.{kind}.{part}")
            if hasattr(module, name):
                setattr(module, name, on_protrain(getattr(module, name)))
    from llamafactory.train.tuner import run_exp

    run_exp()


if __name__ == "__main__":
    main()
