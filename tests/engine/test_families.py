"""Families of transformers, in tiny: they train as in the plain loop, and read what transformers wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain import MisuseError, wrap
from tests.engine.families import FAMILIES, Batch
from tests.engine.harness import Loop, Spec, Trainer, adamw, assert_same, check_equal_to_plain, seeded, wrap_under

transformers = pytest.importorskip("transformers")

# Of two blocks in a row either meets two modes, and all four are met.
PLANS = (Spec("none", "least", "cs"), Spec("some", "least", "in", small=True))
# Each of these takes a path that no other test does, so every run trains them, half of them in bf16: tests of models
# have every structure in both types. The others are slow tests, on the CPU.
QUICK = (
    *("t5", "whisper", "mixtral", "albert", "qwen2", "gemma2", "phi", "gpt_neox", "falcon", "bloom", "bert", "vit"),
    *("deformable_detr", "mamba"),
)


@pytest.mark.parametrize("family", QUICK)
def test_families(family: str, device: torch.device) -> None:
    if family == "deformable_detr" and device.type == "cuda":
        pytest.skip("torch has no deterministic backward of grid_sample there")
    check(family, device, (torch.float32, torch.bfloat16)[QUICK.index(family) % 2])


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in QUICK])
def test_other_families(family: str) -> None:
    check(family, torch.device("cpu"), torch.float32)


def check(family: str, device: torch.device, dtype: torch.dtype) -> None:
    loop, batches = Loop(max_norm=0.5), FAMILIES[family].batches(2)
    check_equal_to_plain(FAMILIES[family].make, batches, device=device, dtype=dtype, run=loop.run, specs=PLANS)


@pytest.mark.parametrize("family", ["t5", "mamba"])
def test_generation_between_steps(family: str, device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer, batches: Sequence[Batch]) -> list[Any]:
        found: list[Any] = []
        for batch in batches:
            found += Loop(scheduler=False).run(model, optimizer, [batch])
            model.eval()
            generate: Any = model.generate
            prompt = batch["input_ids"][:, :4].to(device)
            options = {"max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0}
            for sample in (False, True):
                torch.manual_seed(3)
                mask = torch.ones_like(prompt)
                found.append(generate(prompt, attention_mask=mask, do_sample=sample, **options).tolist())
            model.train()
        return found

    check_equal_to_plain(FAMILIES[family].make, FAMILIES[family].batches(2), run=run, device=device, specs=PLANS)


def test_the_error_for_gemma_3n_names_the_setting_that_makes_it_train(device: torch.device) -> None:
    model, batch = FAMILIES["gemma3n_text"].make(), FAMILIES["gemma3n_text"].batches(1)[0]
    vars(model.config)["altup_coef_clip"] = 1.0
    with pytest.raises(ValueError, match=r"prediction_coefs.* in place, .*vars\(config\)\['altup_coef_clip'\] = None"):
        wrap_under(PLANS[0], model, adamw(model), batch, device=device)


def routed(router_dtype: str) -> nn.Module:
    """Switch Transformers, whose routers convert themselves to this type in forward."""
    with seeded():
        made: Any = FAMILIES["switch_transformers"].make()
        made.config.router_dtype = router_dtype
        model: nn.Module = type(made)(made.config)
    return model


@pytest.mark.parametrize("at", ["wrap", "the first call"])
def test_the_error_for_routers_that_convert_themselves_names_the_setting(at: str) -> None:
    model, (batch,) = routed("float32"), FAMILIES["switch_transformers"].batches(1)
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "progress": False}

    def first_step() -> None:
        wrapped, _ = wrap(model, adamw(model), example_batch=batch if at == "wrap" else None, **options)
        wrapped(**batch)

    words = r"cannot be moved .* to cpu in torch\.float32: .*\(config\.router_dtype = 'bfloat16' of Switch"
    with pytest.raises(MisuseError, match=words):
        first_step()


@pytest.mark.filterwarnings("error:weights")
@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v3", "jamba", "minimax", "mixtral"),  # files have the experts one by one, or other names
        *("bart", "bert", "gpt_neox", "gpt_oss", "llama4_text", "mamba", "t5"),  # most with tied or fused weights
    ],
)
def test_a_folder_that_transformers_wrote_gives_the_model_that_it_reads(family: str, tmp_path: Path) -> None:
    with torch.no_grad(), seeded():
        source: Any = FAMILIES[family].make()
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter) / 50)  # no two norms and biases are alike
    source.save_pretrained(tmp_path)
    reference = type(source).from_pretrained(tmp_path).eval()
    (batch,) = FAMILIES[family].batches(1)
    with protrain.empty_parameters():
        model: Any = FAMILIES[family].make()
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "progress": False, "chunked_loss": False}
    model, _ = protrain.wrap(model, adamw(model), example_batch=batch, weights=tmp_path, **options)
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))
    assert_same(dict(model.state_dict()), dict(source.state_dict()))
    # The same operations on the same values, so the loss has the same bits.
    assert model.eval()(**batch).loss.item() == reference(**batch).loss.item()
