"""Models: built empty with weights from files, with adapters, tied, of mixed types, of several parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import protrain
from tests.engine.harness import adamw
from tests.regressions.plain import (
    ON_DEVICE,
    Blocks,
    assert_same,
    both_plans,
    check,
    left,
    plain,
    rows,
    same_bits,
    step,
    train,
    wrapped,
)
from tests.tiny_models import VOCABULARY, tiny

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def lora(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(1)
    options = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def tokens(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def learn(model: nn.Module, optimizer: Any) -> list[float]:
    values = []
    for seed in range(3):
        loss = model(**tokens(seed)).loss
        loss.backward()
        values += [loss.item(), optimizer.clip_grad_norm_(0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return values


FEW = {"batch": tokens(), "chunked_loss": False, "n_buffer": 3}


def adapted() -> nn.Module:
    model = lora(tiny("llama"))
    model.add_adapter("other", peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model


@same_bits(adapted, **FEW)
def test_an_adapter_that_is_switched_between_two_forwards_has_its_own_gradient(model: Any, optimizer: Any) -> Any:
    """Where a script switched adapters after a forward, gradients were wrong without an error."""
    trained = [p for p in model.parameters() if p.requires_grad]
    values = []
    for seed in range(2):
        losses = []
        for adapter in ("default", "other"):
            model.set_adapter(adapter)
            for parameter in trained:
                parameter.requires_grad_(True)
            losses.append(model(**tokens(seed)).loss)
        step(optimizer, losses[0] + 2 * losses[1])
        values += [loss.item() for loss in losses]
    return values


TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@same_bits(lambda: lora(tiny("mixtral"), target_parameters=TARGETS), **FEW)
def test_experts_are_adapted(model: nn.Module, optimizer: Any) -> list[float]:
    """peft's target_parameters, which adapts the experts of a model, was refused with a wrong reason."""
    return learn(model, optimizer)


def built_empty(base: nn.Module, folder: Path, **options: Any) -> Any:
    """An adapted model that is built empty, with the weights of ``base`` from files, and one that is built plainly."""
    base.save_pretrained(folder)  # type: ignore[operator]
    config = transformers.AutoConfig.from_pretrained(folder)
    with protrain.empty_parameters():
        model = lora(transformers.AutoModelForCausalLM.from_config(config), **options)
    settings: dict[str, Any] = {"example_batch": tokens(), "device": "cpu", "progress": False, "chunked_loss": False}
    return protrain.wrap(model, adamw(model), weights=folder, **settings)[0], lora(base, **options)


@pytest.mark.parametrize(
    ("family", "adapters"),
    [
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("llama", {"modules_to_save": ["mlp"]}),
        ("mixtral", {"target_parameters": ["mlp.experts.down_proj"]}),  # which the files have one by one
    ],
)
def test_what_an_adapter_trains_whole_begins_as_the_files_say(
    family: str, adapters: dict[str, Any], tmp_path: Path
) -> None:
    """weights= refused models with adapters of peft that have modules_to_save, or target_parameters of experts."""
    model, expected = built_empty(tiny(family), tmp_path, **adapters)
    found, values = (
        {name: value for name, value in each.state_dict().items() if "lora_" not in name} for each in (model, expected)
    )
    assert_same(found, values)


@pytest.mark.parametrize("how", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}])
def test_adapters_that_are_computed_from_weights_of_files_are_refused(how: dict[str, Any], tmp_path: Path) -> None:
    """DoRA, PiSSA and OLoRA adapters of an empty model began as if the weights beside them were random ones."""
    with pytest.raises(ValueError, match=r"q_proj\.lora_\w+\.default\.weight\. It was set by .*before an adapter that"):
        built_empty(tiny("llama"), tmp_path, **how)


EXPORTED: dict[str, dict[str, Any]] = {
    "llama": {"modules_to_save": ["lm_head"]},
    "gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
}


@both_plans
@pytest.mark.parametrize("family", EXPORTED)
def test_an_exported_adapter_has_what_was_trained(plan: str, family: str, tmp_path: Path) -> None:
    """export of an adapter writes what peft saves, also modules that are trained whole, which it refused."""
    model, optimizer = wrapped(plan, lambda: lora(tiny(family), **EXPORTED[family]), batch=tokens(), n_buffer=3)
    learn(model, optimizer)
    protrain.export(model, tmp_path / "adapter")
    read = peft.PeftModel.from_pretrained(tiny(family), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(read(**tokens()).logits, model.eval()(**tokens()).logits)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)


class Words(Layered):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.weight.t()


class Turning(Layered):
    def forward(self, x: Tensor, turned: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) @ turned


class Handing(Layered):
    def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.layer(x)) * row, self.layer.weight[1]


class FromOneToAll(Blocks):
    def __init__(self) -> None:
        super().__init__(Turning)
        self.words = Words()

    def forward(self, x: Tensor) -> Tensor:
        x, turned = self.words(x)
        for block in self.blocks:
            x = x + block(x, turned)
        return x @ turned


class FromOneToTheNext(Blocks):
    def __init__(self) -> None:
        super().__init__(Handing)

    def forward(self, x: Tensor) -> Tensor:
        row = torch.ones(16)
        for block in self.blocks:
            x, row = block(x, row)
        return x * row


@both_plans
@pytest.mark.parametrize("model", [FromOneToAll, FromOneToTheNext])
def test_a_view_of_a_weight_goes_from_one_module_to_another(plan: str, model: Callable[[], nn.Module]) -> None:
    """A model that hands a view of a weight from one unit to another failed, or its profile ended the process."""
    check(train, plan, model)


def test_scripts_with_several_models_are_told_what_works() -> None:
    """Scripts with several models were told to do what they could not."""
    both = nn.ModuleDict({"actor": Blocks(), "critic": nn.Linear(16, 16)})
    with pytest.raises(ValueError, match="if it trains several models, wrap one module that holds them all"):
        protrain.wrap(both["actor"], adamw(both), example_batch=rows(), device="cpu")


class Mixed(Blocks):
    """A number in fp32 joins the blocks' type, and a layer meets both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.table)  # type: ignore[operator]


@both_plans
def test_a_model_of_mixed_types_has_a_note_and_trains_under_autocast(plan: str) -> None:
    """A model that mixes bf16 weights with fp32 failed with torch's error alone. A note says what to do."""
    with pytest.raises(RuntimeError, match="dtype") as caught:
        wrapped(plan, Mixed, dtype="bfloat16")
    assert any("torch.autocast" in note for note in caught.value.__notes__)

    def run(plan: str) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model, optimizer = wrapped(plan, Mixed, dtype="bfloat16")
            for seed in range(3):
                step(optimizer, model(rows(seed)).float().square().mean())
            return left(model, optimizer)

    assert_same(run(plan), run("on the device"))


def test_parameters_that_change_between_wrap_and_the_first_call_are_refused() -> None:
    """A save after the training failed, or lacked what had been added."""
    model, _ = wrapped(ON_DEVICE, late=True)
    model.get_submodule("blocks").append(nn.Linear(16, 16))
    with pytest.raises(protrain.MisuseError, match=r"blocks\.4\.\w+ was added, .* before protrain\.wrap"):
        model(rows())


def test_a_model_is_wrapped_in_inference_mode() -> None:
    """wrap said that the model's output depends on no parameter."""
    model = Blocks()
    optimizer = adamw(model)
    with torch.inference_mode():
        training = protrain.wrap(model, optimizer, example_batch=rows(), device="cpu", progress=False)
    assert train(*training) == train(*plain())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric() -> nn.Module:
    layer = nn.Linear(16, 16)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@both_plans
@pytest.mark.parametrize("late", [False, True])
def test_parametrized_weights_are_cached_in_each_step(plan: str, late: bool) -> None:
    """In a first call inside parametrize.cached() weights got no gradient, as it found what the profile had cached."""

    def script(model: nn.Module, optimizer: Any) -> list[float]:
        values = []
        for seed in range(3):
            with parametrize.cached():
                values.append(step(optimizer, model(rows(seed)).square().mean()))
        return values

    check(script, plan, lambda: Blocks(symmetric), late=late)
