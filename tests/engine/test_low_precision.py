"""Language models with float8 products (torchao) train as in the plain loop. Without this package they are skipped."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.forward.compilation import compile_blocks
from protrain.profiler.blocks import find_blocks
from tests.engine.harness import Loop, Spec, check_equal_to_plain, generate_no_code

SPECS = (
    Spec("all", "least", "n"),
    Spec("none", "least", "c", speculate=True),
    Spec("some", "least", "sin", small=True),
)
LOOP = Loop(max_norm=0.5)
MakeBatch = Callable[..., dict[str, Tensor]]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced and partitioned as ever, but without code of its own, which takes long on a CPU."""
    torch._dynamo.reset()
    generate_no_code(monkeypatch)
    yield
    torch._dynamo.reset()


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
