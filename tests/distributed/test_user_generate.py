"""Evaluation and generation on two ranks: the same tokens as on one process, and an error for unequal loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import protrain
from protrain.distributed import watch
from tests.distributed.pool import on_ranks
from tests.distributed.test_bits import VOCABULARY, batches, make
from tests.engine.harness import CKPT, NONE, Spec, adamw, default_loss, wrap_under

CPU = torch.device("cpu")
SPECS = {"all": Spec("all", "all", (NONE,)), "few": Spec("none", "least", (CKPT,))}
WAYS: list[dict[str, Any]] = [
    {},
    {"synced_gpus": True},
    {"synced_gpus": False},  # as Trainer passes it
    {"num_beams": 2},
]


def prompt(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(VOCABULARY, (2, 3 + rank), generator=generator)


def generated(model: Any, rank: int, way: dict[str, Any], end: int | None) -> Tensor:
    """What ``rank`` generates. Rank 0 ends long before rank 1, at two tokens or where the token ``end`` comes."""
    model.eval()
    longest = 2 if rank == 0 and end is None else 9
    tokens: Tensor = model.generate(
        prompt(rank), max_new_tokens=longest, do_sample=False, eos_token_id=end, pad_token_id=0, **way
    )
    model.train()
    return tokens


def expected(rank: int, way: dict[str, Any], end: int | None) -> Tensor:
    return generated(make("llama"), rank, {key: way[key] for key in way if key != "synced_gpus"}, end)


def generate_and_train(rank: int, spec: Spec, ends: list[int | None]) -> tuple[list[Tensor], float]:
    model, data = make("llama"), batches(2)
    wrapped, _ = wrap_under(spec, model, adamw(model), data[0], device=CPU, world_size=2)
    tokens = [generated(wrapped, rank, way, end) for way in WAYS for end in ends]
    loss = default_loss(wrapped, data[rank])
    loss.backward()
    return tokens, loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_tokens_are_those_of_one_process(spec: Spec) -> None:
    ends = [None, int(expected(0, {}, None)[0, -1])]
    first = expected(0, {}, ends[1])
    assert first.shape[1] < expected(1, {}, ends[1]).shape[1], "no rank ends before the other"
    for rank, (tokens, loss) in enumerate(on_ranks(2, generate_and_train, spec, ends, timeout_s=150)):
        want = [expected(rank, way, end) for way in WAYS for end in ends]
        assert all(torch.equal(one, other) for one, other in zip(tokens, want, strict=True))
        assert loss == default_loss(make("llama"), batches(2)[rank]).item(), "the ranks are out of step"


@contextmanager
def quick() -> Iterator[None]:
    """Waits of the watcher that suit tests."""
    before = watch.TICK_S, watch.CAUGHT_S
    watch.TICK_S, watch.CAUGHT_S = 0.3, 1.0
    try:
        yield
    finally:
        watch.TICK_S, watch.CAUGHT_S = before


def do_unlike(rank: int, spec: Spec, what: str) -> str:
    """Rank 1 evaluates on one batch more than rank 0, or generates alone. Returns the error of the rank."""
    model, data = make("llama"), batches(4)
    wrapped: Any
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=CPU, world_size=2)
    _step(wrapped, optimizer, data[rank])
    try:
        with quick():
            if what == "evaluates":
                with torch.no_grad():
                    for batch in data[: 2 + rank]:
                        wrapped(**batch)
            elif rank == 1:
                wrapped.generate(prompt(1), max_new_tokens=4)
            _step(wrapped, optimizer, data[rank])
    except protrain.MisuseError as error:
        return str(error)
    return ""


def _step(model: Any, optimizer: Any, batch: Any) -> None:
    default_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "what"), [("all", "evaluates"), ("few", "generates")])
def test_forwards_that_one_rank_makes_alone(spec: str, what: str) -> None:
    for error in on_ranks(2, do_unlike, SPECS[spec], what):
        assert error == (
            "rank 1 came to a forward under torch.no_grad(), while rank 0 came to a forward. All ranks must make the "
            "same calls in the same order, and have equally many batches: only what is done with their results may "
            "stand under `if rank == 0`"
        )
