"""The number of ranks never changes the result: W ranks have the bits of one process with W micro-batches a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.pool import on_ranks
from tests.distributed.training import set_dropout, train_under
from tests.engine import residual
from tests.engine.harness import FEW_PLANS, PLANS, Spec, adamw, assert_same, default_loss, seeded, wrap_under
from tests.tiny_models import VOCABULARY, tiny

pytest.importorskip("transformers")

WIDTH, SEQUENCE = 24, 16
SPECS = (
    Spec("all", "all", "n"),
    Spec("all", "least", "c"),
    Spec("some", "middle", "scn", small=True),
    Spec("none", "least", "in", speculate=True),
    Spec("none", "middle", "nc", speculate=True, weights=True),
    Spec("none", "least", "c", stream=True),
)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (count, 2, SEQUENCE), generator=generator)
    return [{"input_ids": each, "labels": each} for each in ids]


def check(size: int, specs: Sequence[Spec] = SPECS, *, steps: int = 4, per_rank: int = 1, **how: Any) -> None:
    """Losses, norms and states on ``size`` ranks, under all ``specs``, are those of the plain loop."""
    how["micro_batches"] = count = size * per_rank
    factor = 1.0 / size if how.get("reduction") == "mean" else 1.0  # a power of two, by which nothing is rounded
    ((expected, final),) = train_under(0, 1, ["plain"], steps, {**how, "factor": factor})
    expected = [[*(loss / factor for loss in step[:count]), *step[count:]] for step in expected]
    assert len({loss for step in expected for loss in step[:count]}) > 1, "the plain loop does not train"
    for rank, of_rank in enumerate(on_ranks(size, train_under, size, specs, steps, how)):
        for spec, (found, left) in zip(specs, of_rank, strict=True):
            where = f"rank {rank} under {spec}"
            assert found == [[*step[rank:count:size], *step[count:]] for step in expected], where
            assert_same(left, final, where=where)


# -- ranks that do not run the same units ------------------------------------------------------------------------------


class Tower(residual.Model):
    """Blocks beside a parameter of the tower's own, as vision transformers have them."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


class WithImages(residual.Model):
    """A model whose batches may come with an image for a tower of its own, which some ranks then skip."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.bias = nn.Parameter(torch.zeros(4))
        self.tower = Tower()

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        if image is not None:
            x = x + self.tower(image).repeat(1, 2)
        return super().forward(x) + self.bias


def make_units(*, freeze: bool = False) -> nn.Module:
    with seeded():
        model = set_dropout(WithImages(), 0.0)
    model.get_submodule("blocks").requires_grad_(not freeze)
    return model


def batches_of_units(count: int) -> list[dict[str, torch.Tensor]]:
    """The first has an image, some of the others have one, and there are steps in which no rank has one."""
    generator = torch.Generator().manual_seed(4)
    found = [dict.fromkeys(("x", "image"), torch.randn(4, 8, generator=generator)) for _ in range(count)]
    for index, batch in enumerate(found):
        if index % 3 and index % 7 != 1:
            del batch["image"]
    return found


def of_family(family: str, **how: Any) -> dict[str, Any]:
    return {"make": partial(tiny, family), "batches": batches, **how}


def of_units(**how: Any) -> dict[str, Any]:
    return {"make": make_units, "batches": batches_of_units, **how}


CASES: dict[str, tuple[int, Sequence[Spec], dict[str, Any]]] = {
    "gpt2": (2, SPECS[::3], of_family("gpt2", dtype="bfloat16", reduction="mean")),
    "mistral": (3, SPECS[2:4], of_family("mistral", dtype="bfloat16")),
    "opt": (2, SPECS[4:], of_family("opt", dtype="float16")),
    "several backwards under no_sync": (
        2,
        SPECS[::4],
        of_family("llama", dtype="bfloat16", reduction="mean", per_rank=3, no_sync=True),
    ),
    "several backwards": (3, SPECS[1::2], of_family("llama", per_rank=2)),
    "updates inside backward": (
        3,
        SPECS[2:3],
        of_family("llama", per_rank=2, no_sync=True, inside=True, max_norm=None),
    ),
    "a chunked loss": (2, SPECS[3:4], of_family("llama", dtype="bfloat16", reduction="mean", chunked=True)),
    "a unit in the second backward alone": (2, SPECS[::2], of_units(dtype="bfloat16", per_rank=2)),
    "units that some ranks skip": (3, SPECS[1:3], of_units()),
    "frozen units": (2, SPECS[:1], of_units(make=partial(make_units, freeze=True), dtype="float16", per_rank=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_plain_loop(name: str) -> None:
    size, specs, how = CASES[name]
    check(size, specs, **how)


def peak_on_rank(rank: int) -> tuple[int, int]:
    """The most device memory of steps of one of two ranks that update inside backward, and what was planned."""
    model, data = make_units(), batches_of_units(4)
    how: dict[str, Any] = {"tight": True, "world_size": 2, "step_during_backward": True}
    wrapped, optimizer = wrap_under(SPECS[0], model, adamw(model), data[0], **how)
    for batch in data[rank::2]:
        default_loss(wrapped, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = optimizer.report()
    return report.device_bytes, report.predicted_device_bytes


def test_chunks_that_are_updated_inside_backward_share_memory_for_their_gradients() -> None:
    for peak_bytes, planned_bytes in on_ranks(2, peak_on_rank):
        assert peak_bytes <= planned_bytes


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "family", "dtype"),
    [
        (2, "gpt2", "bfloat16"),
        (2, "llama", "float32"),
        (2, "opt", "float16"),
        (4, "llama", "bfloat16"),
        (8, "llama", "bfloat16"),
    ],
)
def test_several_gpus(size: int, family: str, dtype: str) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    reduction = "sum" if dtype == "float16" else "mean"  # half of a subnormal gradient is rounded
    check(size, steps=10, **of_family(family, dtype=dtype, reduction=reduction, device="cuda"))


# -- generation --------------------------------------------------------------------------------------------------------


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
