"""The stand-in on the meta device needs the memory that Liger's function needs, and the planner predicts it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import protrain
from protrain.forward.chunked_loss import chunk_loss
from protrain.forward.chunked_loss_on_meta import causal_lm_loss, piece_rows
from protrain.hardware.shipped import load
from protrain.planning import fingerprint, search
from protrain.planning.rates.compute_times import compute_times
from protrain.profiler.memory_meter import StorageMeter
from protrain.profiler.meta_device import as_if_on_gpu
from protrain.profiler.model_profile import ModelProfile

Build = Callable[..., nn.Module]
Loss = Callable[..., Tensor]
GPU = torch.device("cuda")  # the device that the traced models train on; it need not exist


class _Kernels:
    """Stands in for Triton kernels, which need a GPU, or an interpreter that allocates too much to be measured."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch


class _SaidToBeOnGpu(TorchFunctionMode):
    """Meta tensors that report a GPU as their device, so that code takes the same path as on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return GPU
        # some versions of torch lack it on meta
        if func is torch.addmm and kwargs is not None and "out_dtype" in kwargs:
            assert kwargs["out"] is args[0], "it adds in place"
            return kwargs["out"]
        args, kwargs = tree_map(lambda leaf: torch.device("meta") if leaf == GPU else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Liger's own function except its cross-entropy kernel, which works in place and without torch."""
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops import fused_linear_cross_entropy

    def cross_entropy(X_ptr: Tensor, Y_ptr: Tensor, loss_ptr: Tensor, **options: Any) -> None:
        if X_ptr.device.type != "cpu":
            return
        logits, targets, losses = X_ptr.numpy(), Y_ptr.numpy(), loss_ptr.numpy()
        counts = targets != options["ignore_index"]
        rows = np.flatnonzero(counts)
        logits -= logits.max(axis=1, keepdims=True)
        sums = np.exp(logits).sum(axis=1)
        losses[rows] = (np.log(sums)[rows] - logits[rows, targets[rows]]) / options["n_non_ignore"]
        np.exp(logits, out=logits)
        logits /= sums[:, None]
        logits[rows, targets[rows]] -= 1
        logits *= counts[:, None] / options["n_non_ignore"]

    monkeypatch.setattr(fused_linear_cross_entropy, "liger_cross_entropy_kernel", _Kernels(cross_entropy))
    module: ModuleType = fused_linear_cross_entropy
    return module


def _profile(model: nn.Module, batch: dict[str, Tensor], *, chunked: bool, dtype: torch.dtype) -> ModelProfile:
    if not chunked:
        return protrain.profile(model, batch, device="meta", dtype=dtype)
    chunk_loss(model, GPU, on_meta=True)
    return protrain.profile(model, batch, device="meta", dtype=dtype)


def _llama(vocabulary: int = 96, hidden: int = 32, layers: int = 3) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    with protrain.empty_parameters():
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _batch(batch: int, sequence: int) -> dict[str, Tensor]:
    return {name: torch.zeros(batch, sequence, dtype=torch.int64) for name in ("input_ids", "labels")}


@pytest.mark.parametrize(("family", "words"), [("llama", 96), ("gpt2", 96), ("opt", 96), ("gpt2", 101)])
@pytest.mark.parametrize("rows", [(2, 16), (4, 60)])  # 60 rows do not divide evenly into pieces
def test_a_step_takes_what_it_takes_with_ligers_function(
    tiny_model: Build,
    tiny_batch: Callable[..., dict[str, Tensor]],
    liger: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    words: int,
    rows: tuple[int, int],
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(liger, "_can_use_mm_out", lambda *_: True)  # as on a GPU
    batch = tiny_batch(batch=rows[0], sequence=rows[1])
    batch["labels"][:, :3] = -100
    expected = tiny_model(family, words=words)(**batch).loss
    model = tiny_model(family, words=words)
    chunk_loss(model, torch.device("cpu"))
    assert model(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)  # this is the function itself
    real = protrain.profile(model, batch, device="cpu", dtype=torch.float32)
    meta = _profile(tiny_model(family, words=words), batch, chunked=True, dtype=torch.float32)
    outside = [[(s.phase, s.live_bytes, s.peak_bytes) for s in p.segments if s.block is None] for p in (meta, real)]
    assert outside[0] == outside[1]
    assert [s.live_bytes for s in meta.segments] == [s.live_bytes for s in real.segments]
    assert (meta.units, meta.calls, meta.chunked_loss) == (real.units, real.calls, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "vocabulary", "bias"), [((4, 64), 1000, False), ((3, 700), 512, True)])
def test_it_takes_what_ligers_function_takes_on_a_gpu(
    liger: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: tuple[int, int],
    vocabulary: int,
    bias: bool,
) -> None:
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    def taken(loss_of: Loss) -> tuple[int, int, int]:
        """The most bytes alive in forward, and those alive after it and after backward, without weights and inputs."""
        hidden = torch.zeros(*rows, 64, dtype=dtype, device="meta", requires_grad=True)
        weight = torch.zeros(vocabulary, 64, dtype=dtype, device="meta", requires_grad=True)
        extra = {"bias": torch.zeros(vocabulary, dtype=dtype, device="meta", requires_grad=True)} if bias else {}
        labels = torch.zeros(*rows, dtype=torch.int64, device="meta")
        with StorageMeter() as meter:
            meter.ignore((hidden, weight, labels, *extra.values()))
            options = {"hidden_size": 64, "accum_dtype": torch.float32, **extra}
            loss = loss_of(hidden_states=hidden, lm_head_weight=weight, labels=labels, **options)
            forward = meter.peak_bytes, meter.alive_bytes
            loss.backward()
            return *forward, meter.alive_bytes

    ours = taken(causal_lm_loss)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch, "equal", lambda first, second: True)
    with as_if_on_gpu(), _SaidToBeOnGpu():
        assert taken(LigerForCausalLMLoss) == ours


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_real_gpu_takes_what_the_meta_device_says(dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel")
    batch = _batch(16, 512)
    batch["labels"] = torch.ones_like(batch["labels"])
    model = _llama(32000, 1024, layers=2)
    chunk_loss(model, GPU)
    real = protrain.profile(model, batch, device="cuda", dtype=dtype)
    meta = _profile(_llama(32000, 1024, layers=2), batch, chunked=True, dtype=dtype)

    def loss(profile: ModelProfile) -> tuple[int, int]:
        """The peak bytes above what was there while the loss is computed, and the bytes that are left after it."""
        forward = [segment for segment in profile.segments if segment.phase == "forward"]
        behind = profile.segments[len(forward)]
        return forward[-1].peak_bytes, behind.live_bytes - forward[-1].live_bytes

    assert loss(meta) == pytest.approx(loss(real), rel=0.03)
    assert [unit.name for unit in meta.units] == [unit.name for unit in real.units]


def test_pieces_are_those_of_liger() -> None:
    triton = pytest.importorskip("triton")
    for rows, hidden, vocabulary in itertools.product((1, 7, 512, 65536), (64, 4096), (50, 32000, 50257)):
        pieces = triton.cdiv(vocabulary, hidden)
        assert piece_rows(rows, hidden, vocabulary) == min(triton.next_power_of_2(triton.cdiv(rows, pieces)), rows)


def test_a_plan_has_no_room_for_logits_and_holds_for_either_loss() -> None:
    words, batch = 8192, _batch(8, 128)
    usual, ours = (_profile(_llama(words), batch, chunked=chunked, dtype=torch.bfloat16) for chunked in (False, True))
    assert (usual.chunked_loss, ours.chunked_loss) == (False, True)
    assert usual.blocks == ours.blocks
    plans = [search(profile, load("h100")) for profile in (usual, ours)]
    less = plans[0].device_bytes - plans[1].device_bytes
    logits = 8 * 128 * words * 2  # then in fp32, where one copy is the loss's own, with gradients
    assert 3 * logits < less < 8 * logits
    assert fingerprint(usual) == fingerprint(ours)


def test_the_products_of_the_head_are_all_in_forward() -> None:
    """Three products of hidden x vocabulary per token in forward. The usual loss has one there and two in backward."""
    batch, hardware = _batch(2, 64), load("h100")
    usual, ours = (
        compute_times(_profile(_llama(2048), batch, chunked=chunked, dtype=torch.bfloat16), hardware)
        for chunked in (False, True)
    )
    product_ms = 1.6 * 2 * 2 * 64 * 2048 * 32 / (hardware.matmul_tflops * 1e9)
    assert (usual.gap_forward[-1], usual.gap_backward[-1]) == pytest.approx((product_ms, 2 * product_ms))
    assert (ours.gap_forward[-1], ours.gap_backward[-1]) == pytest.approx((3 * product_ms, 0))
    assert replace(ours, gap_forward=(), gap_backward=()) == replace(usual, gap_forward=(), gap_backward=())


def test_frozen_weights_have_no_gradient_here_either() -> None:
    model = _llama(4096)
    model.get_submodule("lm_head").requires_grad_(False)
    frozen, trained = (
        _profile(each, _batch(1, 32), chunked=True, dtype=torch.bfloat16) for each in (model, _llama(4096))
    )
    live = [next(s.live_bytes for s in profile.segments if s.phase == "backward") for profile in (frozen, trained)]
    assert live[1] - live[0] == 4096 * 32 * 2


def test_it_stands_in_for_nothing_that_could_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        chunk_loss(_llama(), torch.device("cpu"), on_meta=True)
    with pytest.raises(ValueError, match="not with Sequential"):
        chunk_loss(nn.Sequential(), GPU, on_meta=True)
