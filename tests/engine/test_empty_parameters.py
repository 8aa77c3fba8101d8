"""A model built under empty_parameters has, once wrapped, what its construction made of it: compared bit for bit."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear, init
from torch.nn.utils import parametrizations

import protrain
from tests.engine.harness import CKPT, NONE, Spec, adamw, seeded, wrap_under
from tests.engine.plainly_built import build_both

CPU = torch.device("cpu")
TIGHT, LOOSE = Spec("none", "least", (CKPT,)), Spec("all", "all", (NONE,))
BATCH = (torch.ones(2, 8),)


class Model(nn.Module):
    """Three blocks, and a part that is there to be initialised."""

    def __init__(self, fill: Callable[[Any], None]) -> None:
        super().__init__()
        self.part: Any = nn.Module()
        fill(self.part)
        self.blocks: Any = nn.ModuleList(Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def state_when_wrapped(model: nn.Module, spec: Spec, batch: Any = BATCH) -> dict[str, Tensor]:
    wrapped, _ = wrap_under(spec, model, adamw(model), batch, device=CPU)
    return {name: value.clone() for name, value in wrapped.state_dict().items()}


def check_built_alike(make: Callable[[], nn.Module], batch: Any = BATCH, *, rounding: float = 0.0) -> None:
    """Under a tight and a loose plan, every value is the plainly built model's, but for ``rounding``."""
    for spec in (TIGHT, LOOSE):
        empty, plain = build_both(make)
        assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in empty.named_parameters()] == [
            (n, p.shape, p.dtype, p.requires_grad) for n, p in plain.named_parameters()
        ]
        found = state_when_wrapped(empty, spec, batch)
        assert found.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            expected = value.float() if value.is_floating_point() else value  # what is trained in fp32
            torch.testing.assert_close(found[name], expected, rtol=rounding, atol=rounding, msg=f"{name} under {spec}")


def adapter(part: Any) -> None:
    part.down, part.up = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(8, 2))
    init.kaiming_uniform_(part.down, a=math.sqrt(5))


def gates_that_start_closed(part: Any) -> None:
    part.modulation = nn.Sequential(nn.SiLU(), Linear(8, 48))
    init.constant_(part.modulation[-1].weight, 0)
    init.zeros_(part.modulation[-1].bias)
    part.scale = nn.Parameter(1e-4 * torch.ones(8))


def drawn_and_scaled(part: Any) -> None:
    part.position = nn.Parameter(torch.randn(5, 8) * 0.02)
    part.layers = nn.ModuleList(Linear(8, 8) for _ in range(2))
    for depth, layer in enumerate(part.layers):
        layer.weight.data.div_(math.sqrt(2.0 * (depth + 1)))


def momentum_encoder(part: Any) -> None:
    part.q, part.k, part.also = (nn.Sequential(Linear(8, 4), nn.BatchNorm1d(4)) for _ in range(3))
    part.k.load_state_dict(part.q.state_dict())
    part.k.requires_grad_(False)
    for source, target in zip(part.q.parameters(), part.also.parameters(), strict=True):
        target.data.copy_(source.data)


def normed_weights(part: Any) -> None:
    part.old = nn.utils.weight_norm(Linear(8, 4))
    part.new = parametrizations.weight_norm(Linear(8, 4))
    part.spectral = parametrizations.spectral_norm(Linear(8, 4))


def tables(part: Any) -> None:
    part.a_log = nn.Parameter(torch.log(torch.arange(1, 5, dtype=torch.float32).repeat(3, 1)))
    step = torch.exp(torch.rand(8) * 3 - 7).clamp(min=1e-4)
    part.projection = Linear(2, 8)
    with torch.no_grad():
        part.projection.bias.copy_(step + torch.log(-torch.expm1(-step)))
    part.register_buffer("step", step)
    part.decay = nn.Parameter(torch.linspace(0, 1, 6)[1:].flip(0))
    part.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
    part.last = nn.Parameter(torch.full((3,), part.rates[-1]))


def rows_and_slices(part: Any) -> None:
    part.embedding = nn.Embedding(7, 4, padding_idx=2)
    part.qkv = Linear(4, 12)
    with torch.no_grad():
        q, k, v = part.qkv.weight.chunk(3)
        q.mul_(2)
        k[:, :1] = 3
        v.copy_(q)
    part.gates = Linear(4, 8)
    part.gates.bias.data[2:4].fill_(1)
    part.gates.weight.data[torch.arange(8) % 2 == 0] = 5


def init_functions(part: Any) -> None:
    for name in ("xavier_uniform_", "kaiming_normal_", "trunc_normal_", "eye_", "ones_", "orthogonal_"):
        setattr(part, name, nn.Parameter(torch.empty(6, 5)))
        vars(init)[name](getattr(part, name))
    part.dirac = init.dirac_(nn.Parameter(torch.empty(3, 4, 5)))
    part.sparse = nn.Parameter(torch.empty(6, 5))
    init.sparse_(part.sparse, 0.3)
    part.narrow, part.tail = nn.Parameter(torch.empty(64, 64)), nn.Parameter(torch.empty(64, 64))
    init.trunc_normal_(part.narrow, std=0.02, a=-0.02, b=0.02)
    init.trunc_normal_(part.tail, a=2, b=3)


def torch_layers(part: Any) -> None:
    part.attention = nn.MultiheadAttention(8, 2)
    part.recurrent = nn.LSTM(4, 4, bidirectional=True)
    part.convolution, part.norm = nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    part.encoder = nn.TransformerEncoder(layer, 2)  # deep copies: alike in the beginning


def replaced_data(part: Any) -> None:
    part.a, part.b, part.c = Linear(4, 4), Linear(4, 4), Linear(4, 4)
    part.b.weight.data = part.a.weight.data * 0.5 + 1
    part.c.weight.data = torch.eye(4)
    part.c.bias.data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    init.zeros_(part.a.bias)
    part.copied = copy.deepcopy(nn.Sequential(part.a, part.b))


def numbers_from_outside(part: Any) -> None:
    table = np.arange(8, dtype=np.float32)
    part.layer = Linear(4, 2)
    part.layer.weight.data.copy_(torch.from_numpy(table).view(2, 4))
    part.layer.bias.data = torch.from_numpy(table[:2]) * 3
    table[:] = -1  # its owner goes on with it
    part.temperature = nn.Parameter(torch.tensor(2.6592))
    part.loaded = Linear(2, 2)
    part.loaded.load_state_dict({"weight": torch.eye(2), "bias": torch.ones(2)})


def tied(part: Any) -> None:
    part.embedding, part.head = nn.Embedding(6, 4), Linear(4, 6, bias=False)
    part.head.weight = part.embedding.weight
    init.normal_(part.head.weight, std=0.1)
    part.kept = weight = nn.Parameter(torch.empty(3))
    part.again = weight
    init.uniform_(weight)  # the object that the constructor made, not the one that the module has


def cast_inside(part: Any) -> None:
    part.short, part.moved = Linear(4, 4).half(), Linear(4, 4).to("cpu", torch.bfloat16)
    part.narrow = Linear(4, 4, dtype=torch.bfloat16)
    part.wide = nn.Parameter(part.narrow.weight.detach().float() + 1)
    part.beside = nn.Parameter(torch.zeros(2, device=part.wide.device) + 1)


def under_another_default_dtype(part: Any) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        part.layer, part.drawn = Linear(4, 4), nn.Parameter(torch.randn(5) * 0.02)
        part.log = nn.Parameter(torch.arange(1, 5).log())
    finally:
        torch.set_default_dtype(torch.float32)


def masked(part: Any) -> None:
    part.register_buffer("mask", torch.tril(torch.ones(4, 4)))
    part.a, part.b = Linear(4, 4), Linear(4, 4)
    part.a.weight.data *= part.mask
    part.b.weight.data.masked_fill_(part.mask == 0, 1.5)
    part.both = nn.Parameter(torch.cat([part.a.weight.detach(), torch.ones(1, 4)]))


def buffers_from_parameters(part: Any) -> None:
    part.layer = Linear(4, 4)
    part.register_buffer("shadow", part.layer.weight.detach().clone() * 2)
    part.register_buffer("filled", torch.zeros(4, 4))
    part.filled[:2] = part.layer.weight.data[:2]
    part.from_buffer = nn.Parameter(part.filled + 1)
    drawn = torch.randn(3)
    part.register_buffer("drawn", drawn)
    part.same = nn.Parameter(drawn.clone())


def seeded_again(part: Any) -> None:
    torch.manual_seed(5)
    part.a = Linear(4, 4)
    torch.manual_seed(5)
    part.b = Linear(4, 4)
    generator = torch.Generator().manual_seed(3)
    part.c = nn.Parameter(torch.randn(4, generator=generator))
    part.d = nn.Parameter(torch.empty(4))
    init.normal_(part.d, generator=generator)


def from_singular_vectors(part: Any) -> None:
    part.base = Linear(6, 4)
    u, s, v = torch.linalg.svd(part.base.weight.data, full_matrices=False)
    part.up, part.down = nn.Parameter(u[:, :2] * s[:2]), nn.Parameter(v[:2])
    part.base.weight.data = part.base.weight.data - part.up @ part.down


def parts_of_one_tensor(part: Any) -> None:
    whole = torch.randn(10)
    part.a, part.b = nn.Parameter(whole[2:5]), nn.Parameter(whole[4:8].view(2, 2).t())
    whole.mul_(2)
    part.turned = nn.Parameter(torch.randn(4, 3).t())
    part.mapped = nn.Parameter(torch.vmap(lambda row: row.sin().cumsum(0))(part.turned.detach()))
    part.numbers = nn.Parameter(torch.arange(3), requires_grad=False)
    part.list = nn.ParameterList([nn.Parameter(torch.randn(2)), nn.Parameter(torch.ones(2))])


PARTS = (
    adapter,
    gates_that_start_closed,
    drawn_and_scaled,
    momentum_encoder,
    normed_weights,
    tables,
    rows_and_slices,
    init_functions,
    torch_layers,
    replaced_data,
    numbers_from_outside,
    tied,
    cast_inside,
    under_another_default_dtype,
    masked,
    buffers_from_parameters,
    seeded_again,
    parts_of_one_tensor,
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_every_value_is_what_the_constructor_made() -> None:
    """One model has all of the parts, so that it is wrapped but twice; a failure names the part."""

    def every(part: Any) -> None:
        for fill in PARTS:
            part.add_module(fill.__name__, nn.Module())
            fill(part.get_submodule(fill.__name__))

    check_built_alike(lambda: Model(every))


def test_products_of_singular_vectors_are_what_the_constructor_made_but_for_rounding() -> None:
    """Which strides singular vectors have, and so in which order products add, is not the same without values."""
    check_built_alike(lambda: Model(from_singular_vectors), rounding=1e-6)


def test_an_init_that_is_applied_afterwards_counts() -> None:
    def start(module: nn.Module) -> None:
        if isinstance(module, Linear):
            init.trunc_normal_(module.weight, std=0.02)
            init.zeros_(module.bias)

    check_built_alike(lambda: Model(torch_layers).apply(start))


def test_adapters_may_be_added_in_another_context() -> None:
    with seeded(4), protrain.empty_parameters():
        base = Model(adapter)
    untouched = copy.deepcopy(base)
    with seeded(5), protrain.empty_parameters():
        adapter(base.blocks[1])
        base.blocks[1].up.data[:2] = base.blocks[1].weight[:2, :2].detach()
    found, expected = state_when_wrapped(base, TIGHT), state_when_wrapped(untouched, LOOSE)
    for name, value in expected.items():
        assert torch.equal(found[name], value)
    assert torch.equal(found["blocks.1.up"][:2], expected["blocks.1.weight"][:2, :2])
    assert not found["blocks.1.up"][2:].any()
    assert 0 < found["blocks.1.down"].abs().max() <= (1 / 8) ** 0.5


def test_tied_and_copied_values_are_equal_and_seeds_tell_models_apart() -> None:
    with seeded(1), protrain.empty_parameters():
        models = [Model(momentum_encoder), Model(tied)]
    with seeded(1), protrain.empty_parameters():
        again = Model(momentum_encoder)
    with seeded(2), protrain.empty_parameters():
        other = Model(momentum_encoder)
    copied, same, different = (state_when_wrapped(model, TIGHT) for model in (models[0], again, other))
    for name, value in copied.items():
        assert torch.equal(value, same[name])
        if "part.q.0" in name:
            assert torch.equal(value, copied[name.replace(".q.", ".k.")])
            assert torch.equal(value, copied[name.replace(".q.", ".also.")])
            assert not torch.equal(value, different[name])
    state_when_wrapped(models[1], TIGHT)
    assert models[1].part.head.weight is models[1].part.embedding.weight
    assert models[1].part.kept is models[1].part.again


def test_random_values_are_distributed_as_plainly() -> None:
    class Wide(Model):
        def __init__(self) -> None:
            super().__init__(lambda part: setattr(part, "wide", Linear(256, 256)))
            self.drawn = nn.Parameter(torch.randn(256, 256) * 0.02)
            self.cut = init.trunc_normal_(nn.Parameter(torch.empty(256, 256)), std=0.02, a=-0.04, b=0.04)

    with protrain.empty_parameters():
        model = Wide()
    found = state_when_wrapped(model, TIGHT)
    weight, bound = found["part.wide.weight"], 1 / 256**0.5
    assert 0.99 * bound < weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert found["drawn"].std().item() == pytest.approx(0.02, rel=0.02)
    assert found["cut"].abs().max() <= 0.04
    assert found["cut"].std().item() == pytest.approx(Wide().cut.std().item(), rel=0.02)


def test_what_a_constructor_computes_is_not_kept() -> None:
    storages = []

    def fill(part: Any) -> None:
        drawn = torch.randn(64, 64)
        storages.append(weakref.ref(drawn.untyped_storage()))
        part.scaled = nn.Parameter(drawn * 0.02)

    with protrain.empty_parameters():
        model = Model(fill)
        assert [storage() for storage in storages] == [None]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_attributes_hooks_and_groups_survive() -> None:
    seen: list[Tensor] = []

    def fill(part: Any) -> None:
        weight: Any = nn.Parameter(torch.ones(8))
        weight.no_decay = True
        part.weight = weight
        part.weight.register_post_accumulate_grad_hook(seen.append)

    class Used(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.part.weight)

    with protrain.empty_parameters():
        model = Used(fill)
    kept = model.part.weight
    wrapped: Any
    wrapped, _ = wrap_under(TIGHT, model, adamw(model), BATCH, device=CPU)
    assert wrapped.part.weight is kept
    assert kept.no_decay
    del seen[:]
    wrapped(*BATCH).backward()
    assert len(seen) == 1


@pytest.mark.slow
def test_adapters_of_peft_start_as_their_own_init_says() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    tokens = torch.zeros(1, 4, dtype=torch.long)

    def make(how: str | bool) -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            use_cache=False,
        )
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=how, use_dora=how is True)
        model: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
        return model

    for how in (True, "pissa"):
        check_built_alike(lambda how=how: make(how), {"input_ids": tokens, "labels": tokens})  # type: ignore[misc]
