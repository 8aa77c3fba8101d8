"""The trace sees what autograd and the modules do, needs little memory, and leaves nothing behind."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import protrain
from protrain.common.trees import tensors_in
from protrain.profiler.blocks import find_blocks
from protrain.profiler.model_profile import ModelProfile

profile = partial(protrain.profile, device="cpu")
Builder = Callable[..., Any]


class _Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _Model(nn.Module):
    """A model with everything that is awkward, such as tied and unused weights, and a block that is bypassed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.bypassed = _Block()
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList([_Block() for _ in range(3)])
        self.unused = nn.Linear(3, 3)
        self.gain = nn.ParameterList([nn.Parameter(torch.ones(8))])
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.gain[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = self.drop(torch.tanh(F.linear(x, self.bypassed.up.weight)) @ self.bypassed.down.weight.T)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), ids.flatten())


def _batch() -> tuple[Tensor, ...]:
    return (torch.arange(12).reshape(3, 4),)


def _units(traced: ModelProfile) -> dict[str, set[str]]:
    return {unit.name: {traced.parameters[i].name for i in unit.parameters} for unit in traced.units}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_left_behind(dtype: torch.dtype) -> None:
    model = _Model()
    if dtype == torch.bfloat16:  # the CPU has no batch norm with 16-bit weights and fp32 statistics
        model.norm.running_mean = model.norm.running_var = None
    model.norm.eval()
    model.embed.weight.requires_grad_(False)
    parameters = {name: (p, p.data_ptr(), p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    flags = [module.training for module in model.modules()]
    attributes = [set(module.__dict__) for module in model.modules()]
    torch.manual_seed(5)
    random.seed(5)
    state, python_state = torch.get_rng_state(), random.getstate()
    profile(model, _batch(), dtype=dtype)
    for name, parameter in model.named_parameters():
        before, address, value, requires_grad = parameters[name]
        assert parameter is before
        assert parameter.data_ptr() == address
        assert parameter.dtype == torch.float32
        assert parameter.equal(value)
        assert parameter.requires_grad is requires_grad
        assert parameter.grad is None
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert buffer.equal(buffers[name][1])
    assert [module.training for module in model.modules()] == flags
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.get_rng_state().equal(state)
    assert random.getstate() == python_state


def test_parameters_belong_to_who_uses_them() -> None:
    traced = profile(_Model(), _batch())
    units = _units(traced)
    block = {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert units["layers.1"] == {f"layers.1.{name}" for name in block}
    assert units["embed"] == {"embed.weight"}
    # The model's own forward uses a tied weight, a bare parameter, and a block that is never called.
    assert units[""] == {"embed.weight", "gain.0", "bypassed.up.weight", "bypassed.down.weight"}
    order = [unit.name for unit in traced.units]
    assert order[:3] == ["", "embed", "norm"]
    assert order.index("unused") > order.index("layers.2")
    assert [traced.units[call].name for call in traced.calls] == [
        "",
        "embed",
        "norm",
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    embed = traced.units[order.index("embed")]
    assert [traced.units[outer].name for outer in embed.within] == [""]
    assert [block.name for block in traced.blocks] == ["layers.0", "layers.1", "layers.2"]


def test_groups_come_from_the_optimizer() -> None:
    model = _Model()
    model.norm.requires_grad_(False)
    first: dict[str, Any] = {"params": list(model.layers.parameters())}
    second: dict[str, Any] = {"params": [model.embed.weight, *model.norm.parameters()]}
    optimizer = torch.optim.AdamW([first, second])
    groups = {record.name: record.group for record in profile(model, _batch(), optimizer=optimizer).parameters}
    assert groups["layers.0.up.weight"] == 0
    assert groups["embed.weight"] == 1
    assert groups["norm.weight"] == -1  # frozen, although it is in a group
    assert groups["unused.weight"] == -1  # in no group


def saved_by_block(
    model: nn.Module, batch: dict[str, Tensor], *, compiled: Callable[[Any], Any] = lambda forward: forward
) -> dict[str, int]:
    """What autograd saves of each block, without its inputs and weights, in a forward with ``compiled`` blocks."""
    constant = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, int] = {}
    alive: list[Any] = []  # so that no address is used twice

    def measure(name: str, block: nn.Module) -> None:
        original = compiled(type(block).forward.__get__(block))

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
            saved: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in constant | given:
                    saved[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor.detach())
                return tensor.detach()

            alive.append((args, kwargs))
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = original(*args, **kwargs)
            found[name] = sum(saved.values())
            return output

        vars(block)["forward"] = forward

    for name in find_blocks(model):
        measure(name, model.get_submodule(name))
    model.train()
    model(**batch, use_cache=False)
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_saved_bytes_are_what_autograd_saves(tiny_model: Builder, tiny_batch: Builder, family: str) -> None:
    model, batch = tiny_model(family), tiny_batch()
    traced = profile(model, batch)
    measured = saved_by_block(model, batch)
    assert {block.name: block.saved_bytes for block in traced.blocks} == measured
    assert min(measured.values()) > 0


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_the_meta_trace_agrees_with_the_real_one(tiny_model: Builder, tiny_batch: Builder, family: str) -> None:
    model, batch = tiny_model(family), tiny_batch()
    real = profile(model, batch, device="cpu")
    meta = profile(model, batch, device="meta", dtype=torch.float32)
    assert meta.parameters == real.parameters
    assert meta.units == real.units
    assert meta.calls == real.calls
    assert all(segment.duration_ms == 0 for segment in meta.segments)
    assert any(segment.duration_ms > 0 for segment in real.segments)
    for ours, theirs in zip(meta.blocks, real.blocks, strict=True):
        assert ours.input_bytes == theirs.input_bytes
        # the kernels of attention differ a little
        assert ours.saved_bytes == pytest.approx(theirs.saved_bytes, rel=0.25)
    peaks = [max(s.live_bytes + s.peak_bytes for s in traced.segments) for traced in (meta, real)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.25)


def test_a_meta_model_is_traced_on_a_real_device(tiny_model: Builder, tiny_batch: Builder) -> None:
    model = tiny_model("llama")
    real = profile(model, tiny_batch())
    empty = profile(model.to("meta"), tiny_batch(), device="cpu")
    assert [(s.live_bytes, s.peak_bytes) for s in empty.segments] == [
        (s.live_bytes, s.peak_bytes) for s in real.segments
    ]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_inputs_that_only_a_checkpoint_keeps_are_told_apart() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.tanh(self.up(x)) + y  # a linear layer saves its input, and a sum saves nothing

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.layers = nn.Linear(8, 8), nn.ModuleList([Sum() for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x * 2, x * 3)
            return x

    for block in profile(Model(), (torch.randn(16, 8),)).blocks:
        assert block.input_bytes == 2 * 16 * 8 * 4
        assert block.unsaved_input_bytes == 16 * 8 * 4


def test_a_block_called_often_is_one_block() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([_Block()])

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.layers[0](x)
            return x

    traced = profile(Recurrent(), (torch.randn(2, 8),))
    assert traced.blocks[0].saved_bytes == 3 * 2 * 32 * 4
    assert [segment.block for segment in traced.segments].count(0) == 6
    assert len(traced.calls) == 3


def test_frozen_layers_below_still_end_their_segments() -> None:
    model = nn.Sequential(*[_Block() for _ in range(3)])
    model[0].requires_grad_(False)
    traced = profile(model, (torch.randn(2, 8),))
    assert [s.block for s in traced.segments if s.phase == "backward" and s.block is not None] == [2, 1]


def test_a_checkpointing_model_is_profiled_as_without_and_comes_out_as_it_was(
    tiny_model: Builder, tiny_batch: Builder
) -> None:
    model = tiny_model("llama")
    expected = profile(model, tiny_batch(), device="meta")
    model.gradient_checkpointing_enable()
    assert profile(model, tiny_batch(), device="meta") == expected
    assert model.is_gradient_checkpointing


class _Scaled(_Model):
    """A module that scales a weight in its first forward by its input, as ActNorm does."""

    begun = False

    def __init__(self, scale: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.scale(next(self.parameters()))
        self.begun = True
        return super().forward(x)


@pytest.mark.parametrize("scale", [lambda w: w.detach().mul_(0.5), lambda w: w.data.mul_(0.5)], ids=["", "by data"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_forward_that_writes_a_parameter_is_refused_before_anything_else(
    device: str, scale: Callable[[nn.Parameter], object]
) -> None:
    model = _Scaled(scale)
    name, weight = next(iter(model.named_parameters()))
    before = weight.detach().clone()
    with pytest.raises(ValueError, match=rf"forward of _Scaled changes its parameter {name} in place"):
        profile(model, _batch(), device=device)
    assert torch.equal(weight, before)
    model.begun = False
    model(*_batch())
    assert not torch.equal(weight, before)
    assert profile(model, _batch(), device=device).parameters


def test_a_profile_survives_its_file(tmp_path: Any) -> None:
    traced = profile(_Model(), _batch())
    traced.save(tmp_path / "profile.json")
    assert ModelProfile.load(tmp_path / "profile.json") == traced
    for change, message in (
        ({"accumulation": 0}, "accumulation must be at least 1, not 0"),
        ({"output_bytes": 2**63}, "output_bytes must be a finite number less than 2"),
        ({"segments": [{**traced.segments[0].to_dict(), "duration_ms": math.nan}]}, "duration_ms must be a finite"),
    ):
        (tmp_path / "edited.json").write_text(json.dumps({**traced.to_dict(), **change}))
        with pytest.raises(ValueError, match=message):
            ModelProfile.load(tmp_path / "edited.json")


class _CastsOfWeights(TorchDispatchMode):
    """Counts how often a weight is cast to bf16."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        self.count += is_cast and result.shape == (32, 8)
        return result


def test_casts_of_weights_do_not_outlast_a_step() -> None:
    """Autocast keeps them until its context ends, which is around all of the profile here."""
    with torch.autocast("cpu", dtype=torch.bfloat16), _CastsOfWeights() as casts:
        profile(nn.Sequential(*(_Block() for _ in range(3))), (torch.randn(4, 8),), dtype=torch.float32)
        assert casts.count >= 2 * 3, "in the step that is measured, and in each one that is timed"
