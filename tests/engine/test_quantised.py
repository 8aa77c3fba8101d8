"""Adapters beside frozen weights that are no plain numbers train as in the plain loop, are saved, and are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map

import protrain
from protrain.common.errors import CheckpointError
from tests.engine import residual
from tests.engine.harness import Loop, Spec, adamw, assert_same, generate_no_code, seeded, wrap_under
from tests.engine.plain_loop import prepare_plain

SPECS = (Spec("none", "least", "c", speculate=True), Spec("some", "least", "sin", small=True))
CPU = torch.device("cpu")
WIDTH = 32


class Scaled(Tensor):
    """A tensor made of 8-bit numbers and a scale, with no memory of its own, as those of torchao are."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Scaled:
        make: Any = Tensor._make_wrapper_subclass
        made: Scaled = make(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)
        made.numbers, made.scale = numbers, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Scaled:
        return Scaled(parts["numbers"], parts["scale"])

    # torch's own annotation of this method leaves out ``func``, with which torch calls it.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            kwargs.pop("dtype", None)
            return Scaled(func(args[0].numbers, **kwargs), func(args[0].scale, **kwargs))
        args, kwargs = tree_map(lambda leaf: plain(leaf) if isinstance(leaf, Scaled) else leaf, (args, kwargs))
        return func(*args, **kwargs)


def plain(weight: Scaled) -> Tensor:
    return weight.numbers.to(weight.scale.dtype) * weight.scale


def quantised() -> tuple[Tensor, Tensor]:
    weight = torch.randn(WIDTH, WIDTH) * 0.2
    scale = weight.abs().max() / 127
    return (weight / scale).round().to(torch.int8), scale


class Int8(nn.Module):
    """The scale is an attribute of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        numbers, scale = quantised()
        weight: Any = nn.Parameter(numbers, requires_grad=False)
        weight.scale = scale
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = vars(self.weight)["scale"]
        return x @ (self.weight.to(x.dtype) * scale).t()


class Fp8(nn.Module):
    """Tells by the bytes of an element whether its weight is quantised, as layers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        numbers, scale = quantised()
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.weight = nn.Parameter(numbers.to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.element_size() > 1:
            return x @ self.weight.t()
        return x @ (self.weight.to(x.dtype) * self.scale).t()


class OwnClass(nn.Module):
    """A tensor of another class, which autograd saves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Scaled(*quantised()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Block(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(WIDTH), base
        self.down = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        self.up = nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + torch.tanh(self.base(h) + h @ self.down.t() @ self.up.t())


def make_adapted(kind: Callable[[], nn.Module], *, seed: int = 0) -> nn.Module:
    """Blocks with adapters beside layers that ``kind`` makes, of WIDTH inputs and outputs."""
    with seeded(seed):
        return residual.Model(WIDTH, 3, lambda _: Block(kind()))


def torchao_int8() -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False))
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    return layer


def of_bitsandbytes(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = getattr(pytest.importorskip("bitsandbytes").nn, name)(WIDTH, WIDTH, bias=False, **options)
        layer.load_state_dict(nn.Linear(WIDTH, WIDTH, bias=False).state_dict())
        quantised: nn.Module = layer.to("cpu").requires_grad_(False)
        return quantised

    return make


bitsandbytes_4bit = of_bitsandbytes("Linear4bit", compute_dtype=torch.float32, quant_type="nf4")
bitsandbytes_8bit = of_bitsandbytes("Linear8bitLt", has_fp16_weights=False)
KINDS: list[Any] = [Int8, Fp8, OwnClass, torchao_int8, bitsandbytes_4bit, bitsandbytes_8bit]


def adapted(kind: Callable[[], nn.Module], spec: Spec, *, seed: int = 0, **options: Any) -> Any:
    """The wrapped model and its optimizer."""
    model = make_adapted(kind, seed=seed)
    return wrap_under(spec, model, adamw(model), residual.batches(1)[0], **options)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that train, whole."""
    state = model.state_dict()
    return {name: state[name].clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_in_the_plain_loop(kind: Callable[[], nn.Module]) -> None:
    data, loop = residual.batches(2), Loop()
    model = make_adapted(kind)
    plain, trainer = prepare_plain(model, adamw(model), device=CPU, dtype=torch.float32)
    losses, expected = loop.run(plain, trainer, data), trained(plain)
    assert len(set(losses)) == len(losses)
    for spec in SPECS:
        model = make_adapted(kind)
        kinds = {name: (p.dtype, type(p)) for name, p in model.named_parameters() if name.endswith("base.weight")}
        wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], tight=True)
        assert loop.run(wrapped, optimizer, data) == losses, str(spec)
        found = trained(wrapped)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), str(spec)
        frozen = {name: wrapped.get_parameter(name) for name in kinds}
        assert {name: (p.dtype, type(p)) for name, p in frozen.items()} == kinds


@pytest.mark.slow
def test_compiled_blocks_with_a_4bit_base_have_the_same_bits_under_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    generate_no_code(monkeypatch)
    torch._dynamo.reset()
    counters.clear()
    data, found = residual.batches(2), []
    for spec in SPECS:
        wrapped, optimizer = adapted(bitsandbytes_4bit, spec, tight=True, compile=True)
        found.append((Loop().run(wrapped, optimizer, data), trained(wrapped)))
    torch._dynamo.reset()
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("kind", KINDS)
def test_saves_resume_to_the_same_bits(kind: Callable[[], nn.Module], tmp_path: Path) -> None:
    data, loop = residual.batches(2), Loop(scheduler=False)
    wrapped, optimizer = adapted(kind, SPECS[0])
    loop.run(wrapped, optimizer, data)
    protrain.save_checkpoint(tmp_path, wrapped, optimizer)
    expected = loop.run(wrapped, optimizer, data)
    wrapped, optimizer = adapted(kind, SPECS[1])
    protrain.load_checkpoint(tmp_path, wrapped, optimizer)
    assert loop.run(wrapped, optimizer, data) == expected


@pytest.mark.parametrize("kind", [Int8, bitsandbytes_4bit, bitsandbytes_8bit])
def test_saves_of_weights_that_were_quantised_otherwise_are_refused(
    kind: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Their numbers would be loaded, and their scales, which a save cannot put back, would be those of others."""
    protrain.save_checkpoint(tmp_path, *adapted(kind, SPECS[0]))
    loaded, trainer = adapted(kind, SPECS[0], seed=1)
    before = {name: p.detach().clone() for name, p in loaded.named_parameters() if name.endswith("base.weight")}
    with pytest.raises(CheckpointError, match=r"has other values there, so its weights were quantised otherwise"):
        protrain.load_checkpoint(tmp_path, loaded, trainer)
    assert all(torch.equal(loaded.get_parameter(name), value) for name, value in before.items())


@pytest.mark.parametrize("kind", [Int8, Fp8, OwnClass])
def test_profiles_of_another_device_count_the_bytes_and_leave_the_model(kind: Callable[[], nn.Module]) -> None:
    model = make_adapted(kind)
    before = [(id(p), id(vars(p).get("scale")), p.device) for p in model.parameters()]
    scales = 3 * 4 if kind is not Fp8 else 0  # those are parameters of their own
    for device in ("meta", "cpu"):
        profile = protrain.profile(model, residual.batches(1)[0], device=device, dtype=torch.float32)
        assert profile.buffer_bytes == 3 * WIDTH * WIDTH + scales
    assert [(id(p), id(vars(p).get("scale")), p.device) for p in model.parameters()] == before


def test_a_base_that_is_on_the_device_already_needs_no_room_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that is free on the device does not include the base, and the plan counts the base."""
    monkeypatch.setattr(sys.modules["protrain.hardware.detection"], "available_host_bytes", lambda: 2 * 1024**3)
    for limit, expected in ((None, 1024**3 + 3 * (WIDTH * WIDTH + 4)), ("1GiB", 1024**3)):
        model = make_adapted(Int8)
        _, optimizer = protrain.wrap(
            model, adamw(model), example_batch=residual.batches(1)[0], device="cpu", device_memory=limit, progress=False
        )
        assert optimizer.hardware.device_bytes == expected
