"""A model built under empty_parameters starts with what its initialisers make, the same under every plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear, init

import protrain
from tests.engine.harness import Spec, adamw, assert_same, seeded, wrap_under
from tests.tiny_models import tiny

TIGHT, LOOSE = Spec("none", "least", "c"), Spec("all", "all", "n")
BATCH = (torch.ones(2, 8),)


class Model(nn.Module):
    """Three blocks, and a part that is there to be initialised."""

    def __init__(self, fill: Callable[[Any], None] = lambda part: None) -> None:
        super().__init__()
        self.part: Any = nn.Module()
        fill(self.part)
        self.blocks: Any = nn.ModuleList(Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def built(make: Callable[[], nn.Module], *, seed: int = 0, **options: Any) -> Any:
    with seeded(seed), protrain.empty_parameters(**options):
        return make()


def start_of(model: nn.Module, spec: Spec = TIGHT, batch: Any = BATCH) -> dict[str, Tensor]:
    """The values of ``model`` once it is wrapped."""
    wrapped, _ = wrap_under(spec, model, adamw(model), batch)
    return {name: value.clone() for name, value in wrapped.state_dict().items()}


def starts(make: Callable[[], nn.Module], batch: Any = BATCH, **options: Any) -> dict[str, Tensor]:
    """The values of a model once it is wrapped, which must be the same under a tight and a loose plan."""
    found = start_of(built(make, **options), TIGHT, batch)
    assert_same(found, start_of(built(make, **options), LOOSE, batch))
    return found


def part_of(fill: Callable[[Any], None], **options: Any) -> dict[str, Tensor]:
    """The values of the part that ``fill`` fills."""
    found = starts(lambda: Model(fill), **options)
    return {name.removeprefix("part."): value for name, value in found.items() if name.startswith("part.")}


def is_uniform(value: Tensor, bound: float) -> bool:
    return bool(0.5 * bound < value.abs().max() <= bound)


def test_values_follow_from_seed_and_name_alone() -> None:
    def another(part: Any) -> None:
        part.before = Linear(8, 8)

    found, again, other = starts(Model), starts(Model), starts(Model, seed=1)
    assert_same(found, again)
    with_more = starts(lambda: Model(another))
    for name, value in found.items():
        assert is_uniform(value, 8**-0.5)
        assert torch.equal(value, with_more[name]), "whatever else is made"
        assert not torch.equal(value, other[name])
    assert len({value.view(-1)[0].item() for value in found.values()}) == 6, "no two are alike"


def test_layers_of_torch() -> None:
    def fill(part: Any) -> None:
        part.attention = nn.MultiheadAttention(8, 2)
        part.recurrent = nn.LSTM(4, 4, bidirectional=True)
        part.convolution, part.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm1d(3)
        part.embedding = nn.Embedding(7, 4, padding_idx=2)

    found = part_of(fill)
    assert is_uniform(found["attention.in_proj_weight"], (6 / 32) ** 0.5)
    assert not found["attention.in_proj_bias"].any()
    assert is_uniform(found["attention.out_proj.weight"], 8**-0.5)
    assert not found["attention.out_proj.bias"].any(), "the attention sets the bias of this layer"
    assert all(is_uniform(value, 0.5) for name, value in found.items() if name.startswith("recurrent."))
    assert is_uniform(found["convolution.weight"], 18**-0.5)
    assert (found["norm.weight"] == 1).all()
    assert not found["norm.bias"].any()
    assert (found["embedding.weight"].any(1) == torch.arange(7).ne(2)).all(), "the row of the padding is zero"


class Gate(nn.Module):
    """It sets its parameters itself, and one of a layer within it."""

    def __init__(self, std: float = 0.5) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.empty(8)), Linear(8, 8)
        self.cut, self.turned = nn.Parameter(torch.empty(64, 64)), nn.Parameter(torch.empty(6, 5))
        self.reset_parameters(std, bias=3)

    def reset_parameters(self, std: float, *, bias: int) -> None:
        init.constant_(self.scale, 1e-4)
        self.scale.data[:2] = 7
        init.trunc_normal_(self.cut, std=std, a=-std, b=std)
        init.orthogonal_(self.turned)
        init.normal_(self.inner.weight, std=std)
        self.inner.weight.data.div_(math.sqrt(4))
        self.inner.bias.data.fill_(bias)


def test_initialisers_are_called_with_the_arguments_that_they_had() -> None:
    found = part_of(lambda part: part.add_module("gate", Gate(0.1)))
    assert torch.equal(found["gate.scale"], torch.tensor([7.0, 7, *[1e-4] * 6]))
    assert is_uniform(found["gate.cut"], 0.1)
    turned = found["gate.turned"]
    torch.testing.assert_close(turned.T @ turned, torch.eye(5))
    assert found["gate.inner.weight"].std().item() == pytest.approx(0.05, rel=0.3)
    assert (found["gate.inner.bias"] == 3).all()


def to_small(module: nn.Module) -> None:
    if isinstance(module, Linear | nn.MultiheadAttention):
        for parameter in module.parameters(recurse=False):
            init.uniform_(parameter, -0.01, 0.01)


def of_constants(part: Any) -> None:
    part.layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)  # deep copies
    part.scaled = Linear(8, 8)
    part.scaled.weight.data.mul_(9)


def test_a_function_that_is_applied_counts_and_may_set_copies() -> None:
    def make() -> nn.Module:
        model = Model(of_constants)
        for layer in model.part.layer.layers:
            layer.norm1.reset_parameters()
            layer.norm2.reset_parameters()
        return model.apply(to_small)

    found = starts(make)
    assert all(is_uniform(value, 0.01) for name, value in found.items() if "norm" not in name and value.numel() > 32)
    assert (found["part.layer.layers.1.norm1.weight"] == 1).all()


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        self.kept = nn.Parameter(torch.tensor([1.0, 2.0]))  # its values come from outside


def test_init_sets_what_has_no_initialiser() -> None:
    def set_gain(module: nn.Module) -> None:
        if isinstance(module, Constant):
            init.constant_(module.gain, 3)

    found = part_of(lambda part: part.add_module("own", Constant()), init=set_gain)
    assert (found["own.gain"] == 3).all()
    assert torch.equal(found["own.kept"], torch.tensor([1.0, 2.0]))


def test_a_block_within_a_block_counts_for_both() -> None:
    outer, inner = list[nn.Module](), list[nn.Module]()
    with protrain.empty_parameters(init=outer.append):
        first = Linear(2, 2)
        with protrain.empty_parameters(init=inner.append):
            second = Linear(2, 2)
        third = Linear(2, 2)
    assert (outer, inner) == ([first, second, third], [second])
    assert all(module.weight.is_meta for module in outer)
    assert not Linear(2, 2).weight.is_meta


def test_tied_parameters_are_made_once_as_the_last_initialiser_says() -> None:
    def fill(part: Any) -> None:
        part.embedding, part.head = nn.Embedding(6, 4), Linear(4, 6, bias=False)
        part.head.weight = part.embedding.weight
        part.head.reset_parameters()

    model = built(lambda: Model(fill))
    found = start_of(model)
    assert model.part.head.weight is model.part.embedding.weight
    assert torch.equal(found["part.head.weight"], found["part.embedding.weight"])
    assert is_uniform(found["part.head.weight"], 0.5)


def test_initialisers_leave_alone_what_has_values() -> None:
    """The batch norm sets its statistics along with its weight, and here a script has set them since."""
    model = built(lambda: Model(lambda part: part.add_module("norm", nn.BatchNorm1d(3))))
    model.part.norm.running_mean += 2
    assert (start_of(model)["part.norm.running_mean"] == 2).all()


def test_types_may_be_converted_inside() -> None:
    def fill(part: Any) -> None:
        part.short, part.long = Linear(4, 4).to(torch.bfloat16), Linear(4, 4, dtype=torch.bfloat16).float()
        part.own = Gate().half()

    model = built(lambda: Model(fill))
    with protrain.empty_parameters():
        model.part.own.bfloat16()
    found = start_of(model)
    assert torch.equal(found["part.short.weight"], found["part.short.weight"].bfloat16().float())
    assert model.part.own.scale.dtype == torch.float32
    assert (found["part.own.inner.bias"] == 3).all()


def test_attributes_hooks_and_groups_survive() -> None:
    seen: list[Tensor] = []

    class Used(Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            weight: Any = self.norm.weight
            weight.no_decay = True
            weight.register_post_accumulate_grad_hook(seen.append)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.norm.weight)

    model = built(Used)
    kept = model.norm.weight
    wrapped: Any
    wrapped, _ = wrap_under(TIGHT, model, adamw(model), BATCH)
    assert wrapped.norm.weight is kept
    assert kept.no_decay
    del seen[:]
    wrapped(*BATCH).backward()
    assert len(seen) == 1


@pytest.mark.slow
def test_adapters_start_as_peft_says() -> None:
    peft, tokens = pytest.importorskip("peft"), torch.zeros(1, 4, dtype=torch.long)

    def make() -> nn.Module:
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], init_lora_weights="gaussian")
        model: nn.Module = peft.get_peft_model(tiny("llama"), adapters)
        return model

    found = starts(make, {"input_ids": tokens, "labels": tokens})
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    assert not found[f"{layer}.lora_B.default.weight"].any()
    assert found[f"{layer}.lora_A.default.weight"].std().item() == pytest.approx(0.5, rel=0.2)
    assert not found["base_model.model.model.embed_tokens.lora_embedding_A.default"].any()
