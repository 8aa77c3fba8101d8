"""Stand-in weights stay on the device while there is memory: fewer are filled, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.stand_in_weights import StandInWeights
from tests.profiler.test_trace import _batch, _Model


class _Noisy(nn.Module):
    """Its forward raises an error where a scale is not positive."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        noise: Tensor = torch.distributions.Normal(x, self.scale, validate_args=True).rsample()
        return noise


@pytest.mark.gpu
def test_matrices_are_random_on_a_gpu_and_vectors_are_those_of_the_model() -> None:
    model = _Noisy()
    with StandInWeights(model, torch.device("cuda"), torch.float32) as weights:
        for _ in range(2):
            weights.fill(range(len(weights.stand_ins)))
            for original, stand_in in zip(weights.originals, weights.stand_ins, strict=True):
                assert stand_in.cpu().equal(original) is (original.ndim < 2)
            assert model(torch.randn(4, 8, device="cuda")).isfinite().all()
            weights.empty(range(len(weights.stand_ins)))


def _timeless(profile: ModelProfile) -> ModelProfile:
    times: Any = {"forward_ms": 0.0, "backward_ms": 0.0, "recompute_ms": 0.0, "attention_ms": 0.0}
    return replace(
        profile,
        segments=tuple(replace(segment, duration_ms=0.0) for segment in profile.segments),
        blocks=tuple(replace(block, **times) for block in profile.blocks),
    )


def test_a_profile_is_the_same_wherever_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    fills: Counter[int] = Counter()
    fill = StandInWeights._fill

    def counted(weights: StandInWeights, indexes: list[int]) -> None:
        fills.update(indexes)
        fill(weights, indexes)

    monkeypatch.setattr(StandInWeights, "_fill", counted)
    model, found = _Model(), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = [parameter.nbytes for parameter in model.parameters()]
    kept_bytes: list[int] = []
    for spare_bytes, most in ((0, 4), (300, 4), (10**9, 1)):
        fills.clear()
        monkeypatch.setattr("protrain.profiler.trace._spare_bytes", lambda *_, size=spare_bytes: size)
        found.append(_timeless(protrain.profile(model, _batch(), device="cpu")))
        assert max(fills.values()) == most, "forward and backward of either step"
        kept_bytes.append(sum(sizes[index] for index, count in fills.items() if count == 1))
    assert 0 < kept_bytes[1] - kept_bytes[0] <= 300, "beside what is kept in any case"
    assert found[0] == found[1] == found[2]
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_where_that_leaves_too_little_the_profile_is_taken_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing(_Model):
        failures = 1
        error: Exception = torch.OutOfMemoryError("CUDA out of memory")

        def forward(self, ids: Tensor) -> Any:
            loss = super().forward(ids)
            if self.failures:
                Growing.failures -= 1
                raise self.error
            return loss

    monkeypatch.setattr("protrain.profiler.trace._spare_bytes", lambda *_: 10**9)
    protrain.profile(Growing(), _batch(), device="cpu")
    assert Growing.failures == 0
    Growing.failures, Growing.error = 1, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling it")
    protrain.profile(Growing(), _batch(), device="cpu")
    assert Growing.failures == 0
    Growing.failures, Growing.error = 1, RuntimeError("sizes do not match")
    with pytest.raises(RuntimeError, match="sizes do not match"):
        protrain.profile(Growing(), _batch(), device="cpu")
    Growing.failures, Growing.error = 2, torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        protrain.profile(Growing(), _batch(), device="cpu")
