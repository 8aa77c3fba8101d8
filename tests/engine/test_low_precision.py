"""Language models with a 4-bit base (bitsandbytes) and with float8 products (torchao) train as in the plain loop.

Without these packages the tests are skipped; test_quantised.py has layers of such kinds that are made by hand.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from protrain.forward.compilation import compile_blocks
from protrain.profiler.blocks import find_blocks
from tests.engine.harness import (
    Loop,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    generate_no_code,
    seeded,
    wrap_under,
)

SPECS = (
    Spec("all", "least", "n"),
    Spec("none", "least", "c", speculate=True),
    Spec("some", "least", "sin", small=True),
)
LOOP = Loop(max_norm=0.5)
MakeBatch = Callable[..., dict[str, Tensor]]
Make = Callable[[], nn.Module]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced and partitioned as ever, but without code of its own, which takes long on a CPU."""
    torch._dynamo.reset()
    counters.clear()
    generate_no_code(monkeypatch)
    yield
    torch._dynamo.reset()


@pytest.fixture
def qlora(llama_folder: Callable[..., Path]) -> Make:
    """A model with NF4 weights, as transformers loads it, and an adapter."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    folder = llama_folder(hidden_size=64, intermediate_size=128, num_hidden_layers=3, tie_word_embeddings=False)

    def make() -> nn.Module:
        how = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        load = transformers.AutoModelForCausalLM.from_pretrained
        base = load(folder, quantization_config=how, device_map="cpu", dtype=torch.float32)
        with seeded(1):
            config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
            model: nn.Module = peft.get_peft_model(base, config)
        return model.train()

    return make


@pytest.fixture
def float8(tiny_model: Callable[[str], nn.Module]) -> Callable[[str], nn.Module]:
    """LLaMA whose blocks multiply in float8, by one of torchao's recipes."""
    torchao = pytest.importorskip("torchao.float8")

    def make(recipe: str) -> nn.Module:
        config = dataclasses.replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        model = tiny_model("llama")
        for path in find_blocks(model):
            torchao.convert_to_float8_training(model.get_submodule(path), config=config)
        assert any(type(module).__name__ == "Float8Linear" for module in model.modules())
        return model

    return make


def _trained(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: state[name].clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_compiled_blocks_with_a_4bit_base_have_the_same_bits_under_every_plan(
    qlora: Make, tiny_batch: MakeBatch, compiler: None
) -> None:
    batches, found = [tiny_batch(seed=seed) for seed in range(2)], []
    for spec in SPECS[1:]:
        model = qlora()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches[0], tight=True, compile=True)
        found.append((LOOP.run(wrapped, optimizer, batches), _trained(wrapped)))
        assert found[-1][0] == found[0][0], str(spec)
        assert_same(found[-1][1], found[0][1])
    # One for the first block, whose input needs no gradient, and one for all others.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("recipe", "dtype"), [("tensorwise", torch.float32), ("tensorwise", torch.bfloat16), ("rowwise", torch.bfloat16)]
)
def test_float8_products_have_the_bits_of_the_plain_loop(
    float8: Callable[[str], nn.Module],
    tiny_batch: MakeBatch,
    recipe: str,
    dtype: torch.dtype,
    compile: bool,
    compiler: None,
) -> None:
    """And compiled blocks those of a compiled plain model."""
    make, batches = functools.partial(float8, recipe), [tiny_batch(seed=seed) for seed in range(2)]

    def make_plain() -> nn.Module:
        model = make()
        if compile:
            compile_blocks([model.get_submodule(path) for path in find_blocks(model)])
        return model

    how: dict[str, Any] = {"run": LOOP.run, "dtype": dtype, "specs": SPECS, "compile": compile}
    check_equal_to_plain(make, batches, make_plain=make_plain, **how)
