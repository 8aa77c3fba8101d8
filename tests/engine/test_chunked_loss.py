"""wrap(chunked_loss=True): the usual loss to rounding, the same bits under every plan, and no logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import PlanError
from protrain.forward import liger
from protrain.forward.chunked_loss import chunk_loss, widened
from tests.engine.harness import FEW_PLANS, Loop, Spec, adamw, assert_same, plain_run, states, wrap_under

_LARGE = 4096  # a vocabulary
_ODD = 101  # one whose rows of logits are no multiple of 16 bytes

pytest.importorskip("liger_kernel")
Build = Callable[..., nn.Module]
Batch = dict[str, Tensor]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _kernels_run(device: torch.device, request: pytest.FixtureRequest) -> None:
    if device.type == "cpu":
        request.getfixturevalue("interpreted_kernels")


def _with_chunks(model: nn.Module, device: torch.device) -> nn.Module:
    chunk_loss(model, device)
    return model


@pytest.mark.parametrize(("family", "words"), [("gpt2", 96), ("opt", 96), ("mistral", 96), ("llama", _ODD)])
def test_loss_and_gradients_are_the_usual_ones(
    tiny_model: Build,
    tiny_batch: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    words: int,
    device: torch.device,
) -> None:
    rows, compute = [], liger.import_loss()

    def watched(**options: Any) -> Tensor:
        rows.append(len(options["lm_head_weight"]))
        return compute(**options)

    monkeypatch.setattr(liger, "import_loss", lambda: watched)
    batch = {name: value.to(device) for name, value in tiny_batch(sequence=6).items()}
    batch["labels"][:, :3] = -100
    models = [tiny_model(family, words=words).to(device) for _ in range(2)]
    _with_chunks(models[1], device)
    usual, ours = (model(**batch) for model in models)
    assert usual.loss.item() == pytest.approx(ours.loss.item(), rel=1e-6)
    assert ours.logits.shape == (*usual.logits.shape[:2], 0)
    assert rows == [128 if words == _ODD else words], "a row of logits is a multiple of 16 bytes"
    usual.loss.backward()
    (3 * ours.loss).backward()
    largest = max(float(p.grad.abs().max()) for p in models[0].parameters() if p.grad is not None)
    for (name, first), second in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert first.grad is not None, name
        assert second.grad is not None, name
        torch.testing.assert_close(second.grad / 3, first.grad, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("bias", [False, True])
def test_words_that_no_token_is_change_nothing(bias: bool, device: torch.device) -> None:
    """Neither the loss nor a gradient, that of a bias included."""
    head = nn.Linear(16, _ODD, bias=bias, device=device)
    hidden = torch.randn(3, 7, 16, device=device, requires_grad=True)
    labels = torch.randint(_ODD, (3, 7), device=device)
    labels[:, 2] = -100
    weight, wide_bias = widened(head.weight, head.bias)
    loss = liger.import_loss()(
        hidden_states=hidden,
        lm_head_weight=weight,
        bias=wide_bias,
        labels=labels,
        hidden_size=16,
        accum_dtype=torch.float32,
    )
    usual = nn.functional.cross_entropy(head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    inputs = hidden, *head.parameters()
    for found, expected in zip(
        (loss, *torch.autograd.grad(loss, inputs)), (usual, *torch.autograd.grad(usual, inputs)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "words", "specs"), [("llama", 96, FEW_PLANS[::2]), ("gpt2", _ODD, FEW_PLANS[1::2])])
def test_bits_are_the_same_under_every_plan(
    tiny_model: Build,
    tiny_batch: Callable[..., Batch],
    family: str,
    words: int,
    specs: tuple[Spec, ...],
    device: torch.device,
) -> None:
    batches = [tiny_batch(seed=seed, sequence=6) for seed in range(2)]  # each row of logits is a program to interpret
    loop = Loop(max_norm=0.5)

    def chunked() -> nn.Module:
        return _with_chunks(tiny_model(family, words=words), device)

    expected, final = plain_run(chunked, batches, loop=loop, device=device, dtype=torch.float32)
    for spec in specs:
        model = tiny_model(family, words=words)
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches[0], device=device, chunked_loss=True)
        assert loop.run(wrapped, optimizer, batches) == expected, str(spec)
        assert_same(states(wrapped, optimizer), final)


def _wrapped_plan(device: torch.device, *, chunked_loss: bool, **options: Any) -> protrain.Plan:
    """For a model whose logits are larger than all else."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=_LARGE, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(_LARGE, (2, 16))
    _, optimizer = protrain.wrap(
        model,
        adamw(model),
        example_batch={"input_ids": ids, "labels": ids},
        device=device,
        dtype=torch.float32,
        chunked_loss=chunked_loss,
        progress=False,
        **options,
    )
    return optimizer.plan


def test_the_plan_knows_that_there_are_no_logits(device: torch.device) -> None:
    whole, chunked = (_wrapped_plan(device, chunked_loss=chunked).device_bytes for chunked in (False, True))
    assert whole - chunked > 2 * 16 * _LARGE * 4


def test_a_plan_for_it_goes_without_where_memory_does(device: torch.device) -> None:
    plan = _wrapped_plan(device, chunked_loss=True)
    assert plan.chunked_loss
    with pytest.raises(PlanError, match="made for chunked_loss=True, and here logits are whole: pass it here as well"):
        _wrapped_plan(device, chunked_loss=False, plan=plan, device_memory=plan.device_bytes)
    whole = _wrapped_plan(device, chunked_loss=False, plan=plan)
    assert (whole.model, whole.n_persist, whole.block_modes) == (plan.model, plan.n_persist, plan.block_modes)
    assert not whole.chunked_loss
    back = _wrapped_plan(device, chunked_loss=True, plan=whole, device_memory=plan.device_bytes)
    assert replace(back, step_ms=plan.step_ms) == plan


def test_generation_and_logits_without_labels(
    tiny_model: Build, tiny_batch: Callable[..., Batch], device: torch.device
) -> None:
    plain: Any = tiny_model("llama").to(device)
    batch = {name: value.to(device) for name, value in tiny_batch().items()}
    expected = plain(input_ids=batch["input_ids"]).logits
    _with_chunks(plain, device)
    plain(**batch)
    assert torch.equal(plain(input_ids=batch["input_ids"]).logits, expected), "labels of the call before are forgotten"
    assert plain.generate(batch["input_ids"][:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_nothing_is_left(
    tiny_model: Build, tiny_batch: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="causal language models of transformers, not with Sequential"):
        protrain.wrap(plain, adamw(plain), example_batch=(torch.randn(2, 4),), device=device, chunked_loss=True)
    encoder = tiny_model("t5")
    with pytest.raises(ValueError, match="causal language models of transformers, not with T5ForConditionalGeneration"):
        protrain.wrap(encoder, adamw(encoder), example_batch=tiny_batch(), device=device, chunked_loss=True)
    model = tiny_model("llama")
    before = dict(vars(model)), dict(vars(model.get_submodule("lm_head")))
    with pytest.raises(PlanError):
        protrain.wrap(
            model, adamw(model), example_batch=tiny_batch(), device=device, device_memory="1KiB", chunked_loss=True
        )
    assert (dict(vars(model)), dict(vars(model.get_submodule("lm_head")))) == before
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        protrain.wrap(model, adamw(model), example_batch=tiny_batch(), device="cpu", chunked_loss=True)


def test_logits_that_are_changed_before_the_loss_are_refused(
    tiny_model: Build, tiny_batch: Callable[..., Batch], device: torch.device
) -> None:
    model: Any = tiny_model("llama").to(device)
    head = model.lm_head
    _with_chunks(model, device)
    forward = head.forward
    head.forward = lambda hidden: forward(hidden) / 2  # as families with scaled logits do
    with pytest.raises(ValueError, match="changes its logits"):
        model(**{name: value.to(device) for name, value in tiny_batch().items()})
