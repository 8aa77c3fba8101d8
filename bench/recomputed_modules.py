"""What it costs that a recomputed block finds its modules as they were in its forward.

python bench/recomputed_modules.py --out bench/results/h200/recomputed-modules.json

Every call of a recomputed block, and its second run before and after, asks whether anything in its modules has changed.
Here every second step does without an answer, so that the steps differ in nothing else. The blocks are those of a Llama
of 1.3 billion parameters, all of them recomputed, and the same with adapters: 13 modules in a block and 83. A plan
recomputes blocks where their activations have no room. With few tokens it keeps them, and then nothing is asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import protrain
from protrain.cli.options import writable_folder
from protrain.forward.module_state import Contents
from protrain.planning.plan import BlockMode

SIZES = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16}


class Adapter(nn.Module):
    """The modules and settings that peft puts around a linear layer."""

    def __init__(self, layer: nn.Module, rank: int = 16) -> None:
        super().__init__()
        rows, columns = layer.get_parameter("weight").shape
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, rows, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        self.lora_magnitude_vector = nn.ModuleDict()
        self.scaling, self.r, self.lora_alpha = {"default": 2.0}, {"default": rank}, {"default": 32}
        self.use_dora, self.use_rslora = {"default": False}, {"default": False}
        self.active_adapters, self.merged_adapters = ["default"], list[str]()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with that of the adapter."""
        result: Tensor = self.base_layer(x)
        for name in self.active_adapters:
            inner = self.lora_A[name](self.lora_dropout[name](x))
            result = result + self.lora_B[name](inner) * self.scaling[name]
        return result


def make(*, adapters: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32000, use_cache=False, **SIZES))
    if adapters:
        model.requires_grad_(False)
        for layer in model.model.layers:
            for owner in (layer.self_attn, layer.mlp):
                for name, child in list(owner.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(owner, name, Adapter(child))
    model.to(torch.bfloat16)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def measure(batch: int, *, adapters: bool, steps: int) -> dict[str, Any]:
    """Times in ms of steps that ask, and of steps that do not."""
    ids = torch.randint(0, 32000, (batch, 1024), device="cuda")
    inputs: Any = {"input_ids": ids, "labels": ids}
    options: dict[str, Any] = {"example_batch": inputs, "device": "cuda", "progress": False}
    found = protrain.wrap(*make(adapters=adapters), **options)[1].plan
    blocks = len(found.block_modes)
    plan = dataclasses.replace(found, n_swap=0, n_ckpt=blocks, n_ckpt_swap=0, block_modes=(BlockMode.CKPT,) * blocks)
    model, optimizer = protrain.wrap(*make(adapters=adapters), plan=plan, **options)
    times: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * (steps + 10)):
        asks = step % 2 == 0
        with nullcontext() if asks else patch.object(Contents, "same", lambda _: True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times[asks].append((time.perf_counter() - start) * 1e3)
    differences = [one - other for one, other in zip(times[True][10:], times[False][10:], strict=True)]
    return {
        "adapters": adapters,
        "tokens": ids.numel(),
        "modules_in_a_block": len(list(model.get_submodule("model.layers.0").modules())),
        "chosen_plan_recomputes": found.n_ckpt,
        "median_ms_with": statistics.median(times[True][10:]),
        "median_ms_without": statistics.median(times[False][10:]),
        "median_difference_ms": statistics.median(differences),
        "quartiles_of_differences_ms": statistics.quantiles(differences),
    }


def main() -> int:
    """Measure each case, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=writable_folder)
    args = parser.parse_args()
    record = {
        "command": f"python bench/recomputed_modules.py {' '.join(sys.argv[1:])}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cases": [
            measure(batch, adapters=adapters, steps=args.steps) for adapters in (False, True) for batch in args.batch
        ],
    }
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
