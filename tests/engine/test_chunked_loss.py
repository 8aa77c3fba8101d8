"""The loss in chunks: the usual loss to rounding, the same bits under every plan, and logits for who uses them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError, PlanError
from protrain.forward.chunked_loss import LaterLogits, can_chunk, chunk_loss, is_chunked
from tests.engine.families import make_of_transformers
from tests.engine.harness import FEW_PLANS, Batch, Loop, Spec, adamw, check_equal_to_plain, seeded
from tests.engine.refusing import refused

_ODD = 101  # one whose rows of logits are no multiple of 16 bytes

transformers = pytest.importorskip("transformers")
_Llama: Any = transformers.LlamaForCausalLM
Build = Callable[..., nn.Module]


def _model(family: str, words: int = 96, **options: Any) -> nn.Module:
    """A small model of a family that ``tiny_model`` does not make."""
    with seeded():
        return make_of_transformers(family, "AutoModelForCausalLM", {"vocab_size": words, **options})


def _with_chunks(model: nn.Module) -> nn.Module:
    chunk_loss(model)
    return model


def _capped(words: int) -> nn.Module:
    """Gemma 2, with logits so large that its cap matters."""
    model = _model("gemma2", words, final_logit_softcapping=2.0)
    with torch.no_grad():
        next(model.parameters()).mul_(50)  # the embedding, which is the head as well
    return model


@pytest.mark.parametrize(
    ("family", "words", "given"),
    [
        *[(family, 96, "labels") for family in ("gpt2", "opt", "mistral", "mixtral", "granite")],
        *[("llama", _ODD, given) for given in ("labels", "num_items_in_batch", "shift_labels")],
        *[("gemma2", 96, given) for given in ("labels", "num_items_in_batch")],
    ],
)
def test_loss_gradients_and_logits_are_the_usual_ones(
    tiny_model: Build, tiny_batch: Callable[..., Batch], family: str, words: int, given: str, device: torch.device
) -> None:
    def build() -> nn.Module:
        if family == "gemma2":
            return _capped(words)
        return _model(family, words) if family in ("mixtral", "granite") else tiny_model(family, words=words)

    batch: dict[str, Any] = {name: value.to(device) for name, value in tiny_batch(sequence=6).items()}
    batch["labels"][:, :3] = -100
    if given == "num_items_in_batch":
        batch[given] = torch.tensor(7, device=device)
    elif given == "shift_labels":
        batch[given] = batch["labels"].roll(-2, dims=1)
    models = [build().to(device) for _ in range(2)]
    _with_chunks(models[1])
    usual, ours = (model(**batch) for model in models)
    assert usual.loss.item() == pytest.approx(ours.loss.item(), rel=1e-6)
    assert torch.equal(ours.logits, usual.logits)
    usual.loss.backward()
    (3 * ours.loss).backward()
    largest = max(float(p.grad.abs().max()) for p in models[0].parameters() if p.grad is not None)
    for (name, first), second in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if first.grad is None or second.grad is None:
            assert first.grad is second.grad, name
            continue
        torch.testing.assert_close(second.grad / 3, first.grad, rtol=1e-3, atol=1e-5 * largest)


def _looking(when: str) -> Loop:
    """A step that computes the logits again, for a figure or a part of the loss."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        output = model(**batch)
        if when == "for a figure":
            with torch.no_grad():
                assert output.logits.argmax(-1).shape == batch["labels"].shape
        elif when == "with a graph":
            assert output.logits.float().softmax(-1).sum().isfinite()
        elif when == "for the loss":
            result: Tensor = output.loss + 0.1 * output.logits.float().square().mean()
            return result
        own: Tensor = output.loss
        return own

    return Loop(max_norm=0.5, loss=loss)


@pytest.mark.parametrize(
    ("when", "family", "words", "specs"),
    [
        ("never", "llama", 96, FEW_PLANS[::2]),
        ("for a figure", "gpt2", _ODD, FEW_PLANS[1::2]),
        ("with a graph", "llama", 96, FEW_PLANS[1::2]),
        ("for the loss", "gpt2", _ODD, FEW_PLANS[::2]),
    ],
)
def test_bits_are_the_same_under_every_plan(
    tiny_model: Build,
    tiny_batch: Callable[..., Batch],
    family: str,
    words: int,
    specs: tuple[Spec, ...],
    when: str,
    device: torch.device,
) -> None:
    check_equal_to_plain(
        lambda: tiny_model(family, words=words),
        [tiny_batch(seed=seed, sequence=6) for seed in range(2)],
        run=_looking(when).run,
        device=device,
        specs=specs,
        make_plain=lambda: _with_chunks(tiny_model(family, words=words)),
        chunked_loss=True,
    )


def test_logits_that_are_used_after_backward_are_refused(tiny_model: Build, tiny_batch: Callable[..., Batch]) -> None:
    """Until then they keep the hidden states, which a plan has no room for later."""
    model = _with_chunks(tiny_model("llama"))
    output = model(**tiny_batch())
    output.loss.backward()
    with pytest.raises(MisuseError, match="use them before, or pass chunked_loss=False"):
        output.logits.mean()
    with torch.no_grad():
        output = model(**tiny_batch())
    assert output.logits.isfinite().all()


def test_nothing_computes_logits_that_no_script_uses(
    tiny_model: Build, tiny_batch: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Neither the profile, which would plan for them, nor a step."""

    def whole(logits: LaterLogits) -> Tensor:
        raise AssertionError("logits are computed")

    monkeypatch.setattr(LaterLogits, "whole", whole)
    model = tiny_model("llama")
    batch = tiny_batch()
    profile = protrain.profile(_with_chunks(tiny_model("llama")), batch, device=device, dtype=torch.float32)
    assert profile.chunked_loss
    wrapped, optimizer = protrain.wrap(
        model, adamw(model), example_batch=batch, device=device, device_memory="512MiB", dtype=torch.float32
    )
    output = wrapped(**batch)
    output.loss.backward()
    optimizer.step()


class _Around(nn.Module):
    """A user's module around a language model."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.models[0](input_ids=input_ids, labels=labels)


class _Halving(_Llama):
    """Logits are changed in a way that is no cap."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, **options).last_hidden_state) / 2
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return SimpleNamespace(loss=loss, logits=logits)


def test_where_it_is_known_to_be_the_same_loss(tiny_model: Build, tiny_batch: Callable[..., Batch]) -> None:
    llama = tiny_model("llama")
    hooked = tiny_model("llama")
    hooked.get_submodule("lm_head").register_forward_hook(lambda module, args, output: output / 2)
    assert all(can_chunk(model) for model in (llama, _Around(llama), _capped(96), _model("mixtral")))
    others = (
        nn.Linear(4, 4),
        tiny_model("t5"),
        _model("cohere"),
        _model("granite", logits_scaling=2),
        _Halving(llama.config),
        hooked,
    )
    assert not any(can_chunk(model) for model in (*others, _Around(llama, tiny_model("llama"))))
    assert not any(is_chunked(model) for model in (llama, *others))
    with pytest.raises(ValueError, match="_Halving, which changes its logits before the loss: leave it out"):
        chunk_loss(_Halving(llama.config))
    around = _Around(llama)
    expected = around(**tiny_batch()).loss.item()
    chunk_loss(around)
    assert is_chunked(around)
    assert around(**tiny_batch()).loss.item() == pytest.approx(expected, rel=1e-6)


def test_what_does_not_fit_is_refused_and_nothing_is_left(tiny_model: Build, tiny_batch: Callable[..., Batch]) -> None:
    plain, model = nn.Sequential(nn.Linear(4, 4)), tiny_model("llama")
    words = "causal language models of transformers, not with Sequential"
    refused(plain, adamw(plain), (torch.randn(2, 4),), words, ValueError, chunked_loss=True)
    refused(model, adamw(model), tiny_batch(), "no plan fits", PlanError, device_memory="1KiB", chunked_loss=True)


def test_logits_that_a_later_change_uses_before_the_loss_are_refused(
    tiny_model: Build, tiny_batch: Callable[..., Batch], device: torch.device
) -> None:
    model: Any = tiny_model("llama").to(device)
    _with_chunks(model)
    model.lm_head.register_forward_hook(lambda module, args, output: output / 2)
    with pytest.raises(ValueError, match="uses the logits before the loss, which is computed without them"):
        model(**{name: value.to(device) for name, value in tiny_batch().items()})
