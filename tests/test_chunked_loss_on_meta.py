"""On the meta device the chunked loss needs the memory that it needs elsewhere, and the planner predicts it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.forward.chunked_loss import chunk_loss
from protrain.hardware.shipped import load
from protrain.planning import fingerprint, search
from protrain.profiler.model_profile import ModelProfile
from tests.tiny_models import tiny

Build = Callable[..., nn.Module]
GPU = torch.device("cuda")  # the device that the traced models train on; it need not exist


def _profile(model: nn.Module, batch: dict[str, Tensor], *, chunked: bool, dtype: torch.dtype) -> ModelProfile:
    if chunked:
        chunk_loss(model)
    return protrain.profile(model, batch, device="meta", dtype=dtype)


def _llama(words: int, hidden: int = 32, layers: int = 3) -> nn.Module:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
    with protrain.empty_parameters():
        model: nn.Module = tiny(
            "llama", words=words, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, **sizes
        )
    return model


def _batch(batch: int, sequence: int) -> dict[str, Tensor]:
    return {name: torch.zeros(batch, sequence, dtype=torch.int64) for name in ("input_ids", "labels")}


@pytest.mark.parametrize(("family", "words"), [("llama", 960), ("gpt2", 1001)])
@pytest.mark.parametrize("rows", [(2, 16), (4, 60), (50, 50)])  # the last are two pieces
def test_a_step_takes_what_it_takes_on_the_cpu(
    tiny_model: Build, tiny_batch: Callable[..., dict[str, Tensor]], family: str, words: int, rows: tuple[int, int]
) -> None:
    batch = tiny_batch(batch=rows[0], sequence=rows[1])
    model = tiny_model(family, words=words)
    chunk_loss(model)
    real = protrain.profile(model, batch, device="cpu", dtype=torch.float32)
    meta = _profile(tiny_model(family, words=words), batch, chunked=True, dtype=torch.float32)
    assert [s.live_bytes for s in meta.segments] == [s.live_bytes for s in real.segments]
    outside = [[s.peak_bytes for s in p.segments if s.block is None] for p in (meta, real)]
    kernels = 6 * 64 * words * 4  # what the reference of the kernel takes, where there is no GPU
    assert all(0 <= there - here <= kernels for here, there in zip(*outside, strict=True))
    assert (meta.units, meta.calls, meta.chunked_loss) == (real.units, real.calls, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_real_gpu_takes_what_the_meta_device_says(dtype: torch.dtype) -> None:
    batch = _batch(16, 512)
    batch["labels"] = torch.ones_like(batch["labels"])
    model = _llama(32000, 1024, layers=2)
    chunk_loss(model)
    real = protrain.profile(model, batch, device="cuda", dtype=dtype)
    meta = _profile(_llama(32000, 1024, layers=2), batch, chunked=True, dtype=dtype)

    def loss(profile: ModelProfile) -> tuple[int, int]:
        """The peak bytes above what was there while the loss is computed, and the bytes that are left after it."""
        forward = [segment for segment in profile.segments if segment.phase == "forward"]
        behind = profile.segments[len(forward)]
        return forward[-1].peak_bytes, behind.live_bytes - forward[-1].live_bytes

    assert loss(meta) == pytest.approx(loss(real), rel=0.03)
    assert [unit.name for unit in meta.units] == [unit.name for unit in real.units]


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
