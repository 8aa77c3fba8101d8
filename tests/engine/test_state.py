"""State goes out and comes in under real names, whole and exact, whatever the plan."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.errors import MisuseError
from protrain.optim import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import (
    CKPT,
    NONE,
    SWAP,
    Batch,
    Loop,
    Spec,
    adamw,
    assert_same,
    default_loss,
    states,
    wrap_under,
)
from tests.engine.plain_loop import rounded

FIRST = Spec("none", "least", (CKPT, NONE))
SECOND = Spec("some", "middle", (SWAP, NONE, CKPT), small=True)
RESIDENT = Spec("all", "least", (NONE,))
SPECS = (FIRST, SECOND, RESIDENT)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOOP = Loop(max_norm=0.5, scheduler=False)

Wrapped = tuple[Any, ProTrainOptimizer]
Make = Callable[..., Wrapped]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture
def batches(tiny_batch: Callable[..., Batch]) -> list[Batch]:
    return [tiny_batch(seed=seed) for seed in range(10)]


@pytest.fixture
def make(tiny_model: Callable[..., nn.Module], batches: list[Batch], device: torch.device) -> Make:
    """A wrapped GPT-2 (with tied embeddings) or another family."""

    def build(spec: Spec = FIRST, dtype: torch.dtype = torch.float32, family: str = "gpt2", seed: int = 0) -> Wrapped:
        model = tiny_model(family, seed)
        return wrap_under(spec, model, adamw(model), batches[0], device=device, dtype=dtype)

    return build


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """An unwrapped model with the weights that wrapping gives it."""
    for parameter in model.parameters():
        parameter.data = rounded(parameter.data, dtype)
    return model


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_state_dict_is_that_of_the_unwrapped_model(
    family: str, spec: Spec, dtype: torch.dtype, make: Make, tiny_model: Callable[..., nn.Module]
) -> None:
    model, _ = make(spec, dtype, family)
    plain = cast(tiny_model(family), dtype)
    expected = plain.state_dict()
    found = model.state_dict()
    assert list(found) == list(expected)
    assert vars(found) == vars(expected)  # the versions of modules
    assert_same({k: v.cpu() for k, v in found.items()}, dict(expected))
    for name in ("transformer.h.1", "encoder.block.0.layer.0", "lm_head"):
        if name in dict(plain.named_modules()):
            part, wanted = model.get_submodule(name).state_dict(), plain.get_submodule(name).state_dict()
            assert_same({k: v.cpu() for k, v in part.items()}, dict(wanted))
    other = cast(tiny_model(family, seed=5), dtype)
    other.load_state_dict(found, strict=True)
    assert_same(dict(other.state_dict()), dict(expected))
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())


def test_a_state_dict_is_a_copy_of_its_moment(make: Make, batches: list[Batch]) -> None:
    for spec in SPECS:
        model, optimizer = make(spec)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        taken, moments = model.state_dict(), optimizer.state_dict()
        LOOP.run(model, optimizer, batches[:2])
        assert all(torch.equal(taken[name], before[name]) for name in before)
        assert not torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"])
        assert moments["state"] == {}
        for value in taken.values():
            value.fill_(7.0)
        assert not any((value == 7.0).all() for value in model.state_dict().values())


def test_a_state_dict_is_nobody_elses(make: Make, batches: list[Batch]) -> None:
    """What is written into one shows neither in the next nor in that of a part, also where one was interrupted."""
    for spec in SPECS:
        model, _ = make(spec)
        first = model.state_dict()
        expected = {name: value.clone() for name, value in first.items()}

        def interrupt(*_: Any) -> None:
            raise KeyError("interrupted")

        stop = model.lm_head.register_state_dict_pre_hook(interrupt)
        with pytest.raises(KeyError, match="interrupted"):
            model.state_dict()
        stop.remove()
        for value in first.values():
            value.numpy().fill(7)  # which no version tells
        second = model.state_dict()
        assert_same(second, expected)
        part = model.transformer.h[0].state_dict()
        for value in (*part.values(), model.transformer.wte.state_dict()["weight"]):
            value.zero_()
        assert_same(second, expected)
        assert_same(model.state_dict(), expected)


def test_tied_weights_are_one_tensor(make: Make, batches: list[Batch]) -> None:
    model, optimizer = make()
    LOOP.run(model, optimizer, batches[:1])
    found = model.state_dict()
    assert found["lm_head.weight"].data_ptr() == found["transformer.wte.weight"].data_ptr()
    file = io.BytesIO()
    torch.save(found, file)
    assert file.tell() < 1.3 * sum({v.data_ptr(): v.nbytes for v in found.values()}.values()) + 50_000
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same(loaded, dict(found))
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("weights_first", [True, False], ids=["weights first", "optimizer first"])
@pytest.mark.parametrize(("before", "after"), [(FIRST, SECOND), (SECOND, RESIDENT), (RESIDENT, FIRST)])
def test_training_goes_on_under_another_plan(
    before: Spec, after: Spec, weights_first: bool, dtype: torch.dtype, make: Make, batches: list[Batch]
) -> None:
    model, optimizer = make(before, dtype)
    LOOP.run(model, optimizer, batches[:5])
    optimizer.param_groups[0]["lr"] *= 0.5
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = LOOP.run(model, optimizer, batches[5:])

    other, other_optimizer = make(after, dtype, seed=9)
    LOOP.run(other, other_optimizer, batches[:1])
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    if weights_first:
        other.load_state_dict(saved["model"])
        other_optimizer.load_state_dict(saved["optimizer"])
    else:
        other_optimizer.load_state_dict(saved["optimizer"])
        other.load_state_dict(saved["model"])
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert LOOP.run(other, other_optimizer, batches[5:]) == expected
    assert_same(states(other, other_optimizer), states(model, optimizer))


def test_parameters_are_exported_and_imported_one_by_one(dtype: torch.dtype, make: Make, batches: list[Batch]) -> None:
    model, optimizer = make(FIRST, dtype)
    LOOP.run(model, optimizer, batches[:5])
    saved = {name: optimizer.export_parameter(name) for name in optimizer.parameter_names()}
    scalars = optimizer.scalar_state()
    expected = LOOP.run(model, optimizer, batches[5:])
    for name, tensors in saved.items():
        shape = model.get_parameter(name).shape
        assert {kind: value.shape for kind, value in tensors.items()} == {
            "master": shape,
            "exp_avg": shape,
            "exp_avg_sq": shape,
            "step": torch.Size(()),
        }
        assert all(value.dtype is torch.float32 for value in tensors.values())
        assert float(tensors["step"]) == 5 - optimizer.skipped_steps
    other, other_optimizer = make(SECOND, dtype, seed=9)
    for name in reversed(list(saved)):
        other_optimizer.import_parameter(name, saved[name])
    other_optimizer.load_scalar_state(scalars)
    assert LOOP.run(other, other_optimizer, batches[5:]) == expected
    assert_same(states(other, other_optimizer), states(model, optimizer))


def test_gradients_are_unscaled_by_what_they_were_scaled_with(make: Make, batches: list[Batch]) -> None:
    found, norms = [], []
    for finite_steps in (0, 1999):  # the scale doubles at the first of two steps on the same gradients
        model, optimizer = make(FIRST, torch.float16)
        scalars = optimizer.scalar_state()
        scale = {"scale": 2.0**12, "finite_steps": finite_steps, "skipped": 0}
        optimizer.load_scalar_state({**scalars, "loss_scale": scale})
        torch.manual_seed(1)
        optimizer.backward(default_loss(model, batches[0]))
        optimizer.load_scalar_state({**scalars, "loss_scale": {**scale, "scale": 2.0**10}})
        norms.append(float(optimizer.clip_grad_norm_(1e6)))
        optimizer.load_scalar_state({**scalars, "loss_scale": scale})
        for _ in range(2):
            optimizer.step()
        assert optimizer.skipped_steps == 0
        assert optimizer.scalar_state()["loss_scale"]["scale"] == 2.0 ** (13 if finite_steps else 12)
        found.append(states(model, optimizer))
    assert_same(*found)
    model, optimizer = make(FIRST, torch.float16)
    torch.manual_seed(1)
    optimizer.backward(default_loss(model, batches[0]))
    assert norms == [pytest.approx(float(optimizer.clip_grad_norm_(1e6)), rel=1e-2)] * 2


def test_the_loss_scale_is_part_of_the_state(make: Make, batches: list[Batch]) -> None:
    model, optimizer = make(FIRST, torch.float16)
    scalars = optimizer.scalar_state()
    optimizer.load_scalar_state({**scalars, "loss_scale": {"scale": 2.0**24, "finite_steps": 0, "skipped": 0}})
    LOOP.run(model, optimizer, batches[:5])
    assert optimizer.skipped_steps > 0
    saved, weights = optimizer.state_dict(), model.state_dict()
    expected = LOOP.run(model, optimizer, batches[5:])
    other, other_optimizer = make(SECOND, torch.float16, seed=9)
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(saved)
    assert other_optimizer.skipped_steps == saved["loss_scale"]["skipped"]
    assert LOOP.run(other, other_optimizer, batches[5:]) == expected
    assert_same(states(other, other_optimizer), states(model, optimizer))
    adamw(nn.Linear(1, 1)).load_state_dict({**adamw(nn.Linear(1, 1)).state_dict(), "loss_scale": saved["loss_scale"]})


@pytest.mark.parametrize("loaded", [False, True])
def test_groups_say_how_weights_decay(loaded: bool) -> None:
    """As torch's Adam: an option that may be set at any time, and comes with the state of an AdamW."""
    x = torch.ones(4, 8)
    given = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.01, weight_decay=0.5).state_dict()

    def trained(*, wrapped: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.5)
        if wrapped:
            model, optimizer = protrain.wrap(model, optimizer, example_batch=(x,), device="cpu", progress=False)
        for step in range(6):
            if step == 3 and loaded:
                own = optimizer.state_dict()
                group = {**given["param_groups"][0], "params": own["param_groups"][0]["params"]}
                optimizer.load_state_dict({**own, "param_groups": [group]})
            elif step == 3:
                optimizer.param_groups[0]["decoupled_weight_decay"] = True
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    expected, found = trained(wrapped=False), trained(wrapped=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_states_are_on_the_cpu_under_any_default_device(make: Make, batches: list[Batch]) -> None:
    model, optimizer = make()
    LOOP.run(model, optimizer, batches[:1])
    with torch.device("meta"):
        state = optimizer.state_dict()["state"][0]
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}


def test_imports_of_another_model_are_errors(make: Make) -> None:
    model, optimizer = make()
    with pytest.raises(ValueError, match="no parameter 'nowhere'"):
        optimizer.import_parameter("nowhere", {})
    with pytest.raises(ValueError, match=r"master of transformer.wpe.weight has shape \(2, 2\)"):
        optimizer.import_parameter("transformer.wpe.weight", {"master": torch.zeros(2, 2)})
    state = optimizer.state_dict()
    state["param_groups"][0]["params"] = state["param_groups"][0]["params"][1:]
    with pytest.raises(ValueError, match="load a state of the same model"):
        optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**model.state_dict(), "transformer.wpe.weight": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


def test_torchs_adamw_takes_over(
    make: Make, batches: list[Batch], tiny_model: Callable[..., nn.Module], device: torch.device
) -> None:
    model, optimizer = make(SECOND)
    LOOP.run(model, optimizer, batches[:5])
    plain = tiny_model("gpt2", seed=3).to(device)
    plain_optimizer = adamw(plain)
    plain.load_state_dict(model.state_dict())
    plain_optimizer.load_state_dict(optimizer.state_dict())
    assert {float(state["step"]) for state in plain_optimizer.state.values()} == {5.0}
    unscheduled = Loop(scheduler=False)
    ours = unscheduled.run(model, optimizer, batches[5:])
    theirs = []
    for batch in batches[5:]:
        loss = default_loss(plain, {name: value.to(device) for name, value in batch.items()})
        theirs.append(loss.item())
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert ours == pytest.approx(theirs, rel=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value.cpu(), rtol=1e-4, atol=1e-5)


def test_an_optimizer_with_state_goes_on(
    batches: list[Batch], tiny_model: Callable[..., nn.Module], device: torch.device
) -> None:
    def prepared() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(1)
        model = tiny_model("gpt2").to(device)
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
        for batch in batches[:3]:
            default_loss(model, {name: value.to(device) for name, value in batch.items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return model, optimizer, scheduler

    plain, plain_optimizer, plain_scheduler = prepared()
    expected = []
    for batch in batches[3:]:
        loss = default_loss(plain, {name: value.to(device) for name, value in batch.items()})
        expected.append(loss.item())
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        plain_scheduler.step()
    for spec in SPECS:
        model, inner, scheduler = prepared()
        wrapped, optimizer = wrap_under(spec, model, inner, batches[0], device=device)
        assert optimizer.param_groups is inner.param_groups
        found = []
        for batch in batches[3:]:
            loss = default_loss(wrapped, batch)
            found.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()  # made before wrapping
        assert found == pytest.approx(expected, rel=1e-5)
        assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"]


def test_full_parameters_are_whole_and_their_edits_exact(dtype: torch.dtype, make: Make, batches: list[Batch]) -> None:
    for spec in SPECS:
        model, optimizer = make(spec, dtype)
        LOOP.run(model, optimizer, batches[:2])
        before = {name: value.cpu() for name, value in model.state_dict().items()}
        masters = {name: optimizer.export_parameter(name)["master"] for name in optimizer.parameter_names()}
        with protrain.full_parameters(model):
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.detach(), before[name])
                assert type(parameter.clone()) is Tensor
        assert all(torch.equal(optimizer.export_parameter(n)["master"], masters[n]) for n in masters)

        block = model.transformer.h[1]
        with protrain.full_parameters(block), torch.no_grad():
            block.mlp.c_fc.weight[3] = 0.125
            block.ln_1.bias.data = torch.full_like(block.ln_1.bias, 0.3)
        after = model.state_dict()
        changed = {name for name, value in after.items() if not torch.equal(value.cpu(), before[name])}
        assert changed == {"transformer.h.1.mlp.c_fc.weight", "transformer.h.1.ln_1.bias"}
        assert (after["transformer.h.1.mlp.c_fc.weight"][3] == 0.125).all()
        assert torch.equal(after["transformer.h.1.ln_1.bias"].cpu(), torch.full((32,), 0.3, dtype=dtype))
        master = optimizer.export_parameter("transformer.h.1.mlp.c_fc.weight")["master"]
        kept = torch.arange(len(master)) != 3
        assert torch.equal(master[kept], masters["transformer.h.1.mlp.c_fc.weight"][kept])
        assert (master[3] == 0.125).all()
        first = default_loss(model, batches[0]).item()
        with protrain.full_parameters(model), torch.no_grad():
            model.lm_head.weight.zero_()
        assert default_loss(model, batches[0]).item() != first
        assert not model.state_dict()["transformer.wte.weight"].any()
        assert len(LOOP.run(model, optimizer, batches[:2])) == 4


def test_edits_last_even_when_the_body_raises(make: Make) -> None:
    model, _ = make()

    def edit() -> None:
        with protrain.full_parameters(model), torch.no_grad():
            model.transformer.wpe.weight.fill_(0.5)
            raise KeyError("interrupted")

    with pytest.raises(KeyError, match="interrupted"):
        edit()
    assert (model.state_dict()["transformer.wpe.weight"] == 0.5).all()
    with pytest.raises(MisuseError, match="full_parameters"):
        model.transformer.wpe.weight.sum()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_state_is_loaded_after_a_backward_that_raised(spec: Spec, device: torch.device) -> None:
    data, model = residual.batches(2), residual.make()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    weights, state, before = wrapped.state_dict(), optimizer.state_dict(), states(wrapped, optimizer)
    default_loss(wrapped, data[0]).backward()
    optimizer.step()
    block: Any = wrapped.get_submodule("blocks.1")
    for load in (lambda: optimizer.load_state_dict(state), lambda: wrapped.load_state_dict(weights)):
        block.fails = "backward"
        with pytest.raises(ArithmeticError, match="backward fails"):
            default_loss(wrapped, data[1]).backward()
        block.fails = ""
        load()
    assert_same(states(wrapped, optimizer), before)


def test_full_parameters_needs_a_wrapped_model() -> None:
    with (
        pytest.raises(ValueError, match=r"needs a model that protrain\.wrap returned"),
        protrain.full_parameters(nn.Linear(2, 2)),
    ):
        pass


def test_save_pretrained_writes_the_weights(
    make: Make, batches: list[Batch], dtype: torch.dtype, tmp_path: Path
) -> None:
    for family in ("gpt2", "llama"):
        model, optimizer = make(SECOND, dtype, family)
        LOOP.run(model, optimizer, batches[:2])
        model.save_pretrained(tmp_path / family)
        loaded = type(model).from_pretrained(tmp_path / family, dtype=dtype)
        assert_same(dict(loaded.state_dict()), {k: v.cpu() for k, v in model.state_dict().items()})


def test_what_cannot_work_says_so(make: Make, batches: list[Batch]) -> None:
    for spec in SPECS:
        model, optimizer = make(spec)
        with pytest.raises(MisuseError, match="use assign=False"):
            model.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(MisuseError, match=r"use model.state_dict\(\)"):
            copy.deepcopy(model)
        with pytest.raises(MisuseError, match=r"use model.state_dict\(\)"):
            pickle.dumps(model.lm_head)
        assert len(LOOP.run(model, optimizer, batches[:2])) == 4


def test_values_that_say_more_than_a_weight_holds_become_the_master(device: torch.device) -> None:
    data = residual.batches(1)
    model = residual.make()
    spec = Spec("none", "least", (NONE,))
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    name = "blocks.1.first.weight"
    finer = wrapped.state_dict()[name].float() * (1 + 2.0**-12)
    wrapped.load_state_dict({name: finer}, strict=False)
    assert torch.equal(optimizer.export_parameter(name)["master"], finer.cpu())
    wrapped.load_state_dict({name: finer.bfloat16()}, strict=False)
    assert torch.equal(optimizer.export_parameter(name)["master"], finer.cpu()), "the same weight says nothing new"
