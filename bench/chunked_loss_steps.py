"""What steps take with ProTrain's chunked loss and with Liger's, in turns, and how often each waits for the device.

python bench/chunked_loss_steps.py --out bench/results/h200/chunked-loss-steps.json

Every second step of one training has the loss of Liger that ``chunked_loss`` used before, so that the steps differ in
nothing else. The errors of both losses, and of torch's with whole logits, are against fp64. Then steady steps of
``wrap``, of the Trainer and, where it is installed, of TRL's SFTTrainer run while torch warns of every operation that
waits for the device.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import protrain
from protrain.cli.options import writable_folder
from protrain_kernels import linear_cross_entropy

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# The sizes of Gemma 7B in a Llama, without Gemma's tied head.
WIDE_8B = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 16384,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
}
SMALL = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
CASES: dict[str, tuple[dict[str, int], bool, int, int]] = {  # sizes, whether adapters alone are trained, batch, tokens
    "1.35 B": (SMALL, False, 1, 1024),
    "LoRA of 8 B": (LLAMA_8B, True, 1, 1024),
    "Llama-3 8 B": (LLAMA_8B, False, 8, 2048),
    "vocabulary of 256,000": (WIDE_8B, False, 8, 2048),
}
_NEEDLE = "synchronizing CUDA operation"


def liger(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    divisor: Any,
    ignore_index: int,
    softcap: float,
) -> Tensor:
    """Liger's loss, called as ``LigerForCausalLMLoss`` calls it."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    reduction = "mean" if divisor is None else "sum"
    loss: Any = LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, targets, bias, None, ignore_index, 0.0, 0.0, reduction, softcap or None, False, torch.float32
    )
    loss = loss[0] if isinstance(loss, tuple) else loss
    result: Tensor = loss if divisor is None else loss / divisor
    return result


def make(sizes: dict[str, int], *, adapters: bool) -> tuple[Any, torch.optim.Optimizer]:
    """The model and its optimizer."""
    import transformers

    torch.manual_seed(0)
    with protrain.empty_parameters():
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **sizes))
        if adapters:
            import peft

            options: Any = peft.LoraConfig(r=16, target_modules="all-linear")
            model = peft.get_peft_model(model, options)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)


def measure(name: str, steps: int) -> dict[str, Any]:
    """Times in ms of steps with either loss."""
    sizes, adapters, batch, sequence = CASES[name]
    ids = torch.randint(0, sizes["vocab_size"], (batch, sequence), device="cuda")
    inputs: Any = {"input_ids": ids, "labels": ids}
    model, optimizer = make(sizes, adapters=adapters)
    model, wrapped = protrain.wrap(model, optimizer, example_batch=inputs, chunked_loss=True, device="cuda")

    def step() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(**inputs).loss.backward()
        wrapped.step()
        wrapped.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    times: dict[str, list[float]] = {"ours": [], "liger": []}
    for _ in range(steps + 3):
        times["ours"].append(step())
        with patch("protrain.forward.chunked_loss.linear_cross_entropy", liger):
            times["liger"].append(step())
    ours, before = (kept[3:] for kept in times.values())
    ratios = [one / other for one, other in zip(ours, before, strict=True)]
    waits = synchronisations(step)
    return {
        "case": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": batch * sequence,
        "batch": batch,
        "sequence": sequence,
        "predicted_ms": wrapped.plan.step_ms,
        "median_ms": statistics.median(ours),
        "range_ms": [min(ours), max(ours)],
        "liger_median_ms": statistics.median(before),
        "liger_range_ms": [min(before), max(before)],
        "median_ratio": statistics.median(ratios),
        "quartiles_of_ratios": statistics.quantiles(ratios),
        "synchronisations_besides_the_benchmark": waits,
    }


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """torch's loss of whole logits, in fp32 unless they are in fp64."""
    logits = nn.functional.linear(hidden, weight)
    return nn.functional.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)


def errors(rows: int = 8192, width: int = 3584, words: int = 32000) -> dict[str, Any]:
    """Errors of the loss and of both gradients in bf16, as the norm of the difference over that of the fp64 value."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda").bfloat16()
    weight = (torch.randn(words, width, device="cuda") * 0.02).bfloat16()
    targets = torch.randint(0, words, (rows,), device="cuda")

    def results(compute: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        loss = compute(*inputs, targets, bias=None, divisor=None, ignore_index=-100, softcap=0.0)
        return [loss.detach().double(), *(each.double() for each in torch.autograd.grad(loss, inputs))]

    expected = results(whole, torch.float64)
    found: dict[str, Any] = {"rows": rows, "hidden": width, "words": words}
    for name, compute in (("ours", linear_cross_entropy), ("liger", liger), ("whole logits", whole)):
        pairs = zip(results(compute, torch.bfloat16), expected, strict=True)
        relative = [float((one - other).norm() / other.norm()) for one, other in pairs]
        found[name] = dict(zip(("loss", "hidden", "weight"), relative, strict=True))
    return found


@contextmanager
def _noted(found: Counter[str]) -> Iterator[None]:
    """Count the places that wait for the device while the mode is on."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        yield
    for each in raised:
        if _NEEDLE in str(each.message):
            found[f"{Path(each.filename).parent.name}/{Path(each.filename).name}:{each.lineno}"] += 1


def synchronisations(step: Callable[[], Any]) -> dict[str, int]:
    """Where one call of ``step`` waits, and how often. torch.cuda.synchronize() does not count."""
    found: Counter[str] = Counter()
    with _noted(found):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(found)


def waits_of_trainers() -> dict[str, Any]:
    """Where four steady steps of the Trainer and of SFTTrainer wait, and how often."""
    import transformers

    from protrain.integrations.transformers import ProTrainMixin

    class Watch(transformers.TrainerCallback):
        """Watches the steps from the fifth to the eighth."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Switch the warnings on or off."""
            torch.cuda.set_sync_debug_mode("warn" if 4 <= state.global_step < 8 else "default")

    sizes = {**SMALL, "num_hidden_layers": 2}
    rows = [{"input_ids": [*range(256)], "labels": [*range(256)]} for _ in range(48)]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": 12,
            "per_device_train_batch_size": 4,
            "report_to": "none",
            "logging_steps": 1000,
            "save_strategy": "no",
            "bf16": torch.cuda.is_available(),
            "use_cpu": not torch.cuda.is_available(),
            "disable_tqdm": True,
        }
        for kind in ("Trainer", "SFTTrainer"):
            found: Counter[str] = Counter()
            model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **sizes))
            try:
                if kind == "Trainer":
                    arguments: Any = transformers.TrainingArguments(**options)
                    made: Any = type("Trained", (ProTrainMixin, transformers.Trainer), {})
                    data: Any = rows
                else:
                    import datasets
                    import tokenizers
                    import trl

                    words = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
                    tokenizer = transformers.PreTrainedTokenizerFast(
                        tokenizer_object=tokenizers.Tokenizer(words), pad_token="<pad>", eos_token="<eos>"
                    )

                    arguments = trl.SFTConfig(**options, dataset_kwargs={"skip_prepare_dataset": True})
                    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows])
                    made = type("Trained", (ProTrainMixin, trl.SFTTrainer), {})
            except ImportError as error:
                result[kind] = f"left out: {error}"
                continue
            given: dict[str, Any] = {} if kind == "Trainer" else {"processing_class": tokenizer}
            trainer = made(model=model, args=arguments, train_dataset=data, callbacks=[Watch()], **given)
            with _noted(found):
                trainer.train()
            result[kind] = dict(found)
    return result


def main() -> int:
    """Measure each case, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=list(CASES), nargs="*", default=list(CASES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=writable_folder)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "command": f"python bench/chunked_loss_steps.py {' '.join(sys.argv[1:])}",
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", "transformers", "liger-kernel")},
        "cases": [],
    }
    for name in args.case:
        record["cases"].append(measure(name, args.steps))
        print(json.dumps(record["cases"][-1], indent=1), flush=True)
        torch.cuda.empty_cache()
    record["errors"] = errors()
    print(json.dumps(record["errors"], indent=1), flush=True)
    record["synchronisations_in_four_steps"] = waits_of_trainers()
    print(json.dumps(record["synchronisations_in_four_steps"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
