"""LLaMA-Factory on ProTrain: `python protrain_llamafactory.py config.yaml low_cpu_mem_usage=false`."""

import importlib

from protrain.integrations.transformers import on_protrain

for kind, name in {"pt": "CustomTrainer", "sft": "CustomSeq2SeqTrainer", "dpo": "CustomDPOTrainer"}.items():
    for part in ("trainer", "workflow"):
        module = importlib.import_module(f"llamafactory.train.{kind}.{part}")
        if hasattr(module, name):
            setattr(module, name, on_protrain(getattr(module, name)))

importlib.import_module("llamafactory.train.tuner").run_exp()
