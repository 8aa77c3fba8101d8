"""An example and a generation have the results of one process on two ranks."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.pool import on_ranks
from tests.distributed.test_bits import batches
from tests.engine.harness import FEW_PLANS, PLANS, Spec, adamw, default_loss, wrap_under
from tests.tiny_models import VOCABULARY, tiny

ROOT = Path(__file__).parents[2]


def pretrain(rank: int, folder: str) -> list[float]:
    script = runpy.run_path(str(ROOT / "examples/pretrain.py"))
    options = ["--device", "cpu", "--steps", "2", "--micro-batches", "2", "--folder", folder]
    losses: list[float] = script["main"](options)
    return losses


@pytest.mark.slow
def test_the_example_has_the_same_bits_in_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    expected = pretrain(0, str(tmp_path / "one"))
    assert on_ranks(2, pretrain, str(tmp_path / "two")) == [expected] * 2
    weights = [tmp_path / name / "model/model.safetensors" for name in ("one", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def generated(model: Any, rank: int, end: int | None, **way: Any) -> Tensor:
    """What ``rank`` generates. Rank 0 ends long before rank 1, at two tokens or where the token ``end`` comes."""
    model.eval()
    prompt = torch.randint(VOCABULARY, (2, 3 + rank), generator=torch.Generator().manual_seed(rank))
    length = 2 if rank == 0 and end is None else 9
    tokens: Tensor = model.generate(
        prompt, max_new_tokens=length, do_sample=False, eos_token_id=end, pad_token_id=0, **way
    )
    model.train()
    return tokens


def generate_and_train(rank: int, spec: Spec, ends: list[int | None]) -> tuple[list[Tensor], float]:
    model, data = tiny("llama"), batches(2)
    wrapped, _ = wrap_under(spec, model, adamw(model), data[0], world_size=2)
    tokens = [generated(wrapped, rank, end, **way) for way in ({}, {"synced_gpus": False}) for end in ends]
    loss = default_loss(wrapped, data[rank])
    loss.backward()
    return tokens, loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [PLANS[0], FEW_PLANS[0]], ids=str)
def test_generated_tokens_are_those_of_one_process(spec: Spec) -> None:
    """Also where transformers' Trainer says that ranks need not wait for each other."""
    plain = tiny("llama")
    ends = [None, int(generated(plain, 0, None)[0, -1])]
    assert generated(plain, 0, ends[1]).shape[1] < generated(plain, 1, ends[1]).shape[1], (
        "no rank ends before the other"
    )
    for rank, (tokens, loss) in enumerate(on_ranks(2, generate_and_train, spec, ends)):
        expected = [generated(plain, rank, end) for end in ends]
        assert all(torch.equal(*pair) for pair in zip(tokens, expected * 2, strict=True))
        assert loss == default_loss(plain, batches(2)[rank]).item(), "the ranks are out of step"
