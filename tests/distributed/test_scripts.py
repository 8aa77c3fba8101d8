"""Whole scripts of kinds that people train by on several ranks, each with the bits of the plain loop on as many."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn import functional

import protrain
from protrain.optim.optimizer import ProTrainOptimizer
from tests.distributed import test_bits as bits
from tests.distributed.pool import on_ranks
from tests.engine.harness import FEW_PLANS, PLANS, Spec, adamw, default_loss, wrap_under
from tests.engine.plain_loop import prepare_plain

WORDS, WIDTH, ROWS = 32, 16, 4
EXAMPLE = (torch.zeros(ROWS, 6, dtype=torch.int64),)
ROOT = Path(__file__).parents[2]


class Model(nn.Module):
    """A small model of language."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Loop:
    """A model with its optimizer, of ProTrain or of the plain loop, on one of two ranks."""

    def __init__(self, model: nn.Module, optimizer: Any, rank: int) -> None:
        self.model, self.optimizer, self.rank = model, optimizer, rank
        self.told: list[float] = []  # losses and whatever else the script decides by

    def ids(self, step: int, length: int = 6) -> Tensor:
        """The batch of this rank."""
        return torch.randint(0, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(10 * step + self.rank))

    def loss(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(ids).flatten(0, 1), ids.roll(1).flatten())

    @property
    def is_wrapped(self) -> bool:
        return isinstance(self.optimizer, ProTrainOptimizer)

    def step(self, loss: Tensor, look: Callable[[], Any] = lambda: None) -> None:
        """A step, in which the script may ``look`` at something between backward and update."""
        loss.backward()
        look()
        if not self.is_wrapped:
            for total in self.optimizer.sums.values():  # of two ranks, whose sum has one order
                dist.all_reduce(total)
                total.mul_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.told.append(loss.item())


def contrast(loop: Loop) -> None:
    """Embeddings of all ranks are compared, and their gradients go back to the ranks that computed them."""
    for step in range(3):
        ids = loop.ids(step)
        pooled = functional.normalize(loop.model(torch.cat((ids, ids.roll(1, 0)))).mean(1), dim=-1)
        first, second = (
            torch.cat(torch.distributed.nn.functional.all_gather(half.contiguous())) for half in pooled.chunk(2)
        )
        loop.step(functional.cross_entropy(5 * first @ second.T, torch.arange(2 * ROWS)))


def grow(loop: Loop) -> None:
    """Rows become longer than the planned ones, on one rank more than on the other."""
    for step, length in enumerate((2, 6, 8, 13)):
        loop.step(loop.loss(loop.ids(step, length + step * loop.rank)))


def freeze(loop: Loop) -> None:
    """The first layers are frozen for a while."""
    early = [*loop.model.get_submodule("embedding").parameters(), *loop.model.get_submodule("blocks.0").parameters()]
    for step in range(6):
        if step in (2, 4):
            for parameter in early:
                parameter.requires_grad = step == 4
        loop.step(loop.loss(loop.ids(step)))


def decide(loop: Loop) -> None:
    """The learning rate follows a metric of all ranks, and rank 0 alone decides when to stop."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer, factor=0.5, patience=0)
    stop = torch.zeros(1)
    for epoch in range(8):
        for step in range(2):
            loop.step(loop.loss(loop.ids(step)))
        metric = _validated(loop)
        scheduler.step(metric)
        loop.told += [metric, loop.optimizer.param_groups[0]["lr"]]
        if loop.rank == 0:
            stop += epoch == 2
        dist.broadcast(stop, 0)
        if stop:
            break


def penalise(loop: Loop) -> None:
    """A term of the loss is made of weights."""
    for step in range(2):
        loss = loop.loss(loop.ids(step))
        with protrain.full_parameters(loop.model) if loop.is_wrapped else nullcontext():
            term = torch.stack([weight.square().sum() for weight in loop.model.parameters()]).sum()
        loop.step(loss + 1e-2 * term)


def look_alone(loop: Loop) -> None:
    """Rank 1 alone looks at norms of gradients and at texts in the middle of each step."""

    def look() -> None:
        if loop.rank == 1 and loop.is_wrapped:
            assert all(p.grad is not None and p.grad.norm() > 0 for p in loop.model.parameters())
            text = f"{loop.optimizer.report()} {loop.optimizer.explain()} {loop.optimizer.plan}"
            assert "between ranks" in text
            assert "world_size=2" in text

    for step in range(2):
        loop.step(loop.loss(loop.ids(step)), look)


def _validated(loop: Loop) -> float:
    with torch.no_grad():
        metric = loop.loss(loop.ids(99))
    dist.all_reduce(metric)
    return metric.item()


def train(rank: int, script: Callable[[Loop], None], spec: Spec) -> list[str]:
    """Where ``script`` differs from the plain loop."""
    loops = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = Model()
        optimizer = adamw(model)
        trained: Any
        if wraps:
            trained = wrap_under(spec, model, optimizer, EXAMPLE, world_size=2)
        else:
            trained = prepare_plain(model, optimizer, device=torch.device("cpu"), dtype=torch.float32)
        loop = Loop(trained[0], trained[1], rank)
        script(loop)
        loops.append(loop)
    plain, wrapped = loops
    states = wrapped.model.state_dict()
    differing = [name for name, value in plain.model.state_dict().items() if not torch.equal(value, states[name])]
    return differing + ([] if plain.told == wrapped.told else [f"{wrapped.told}, not {plain.told}"])


@pytest.mark.parametrize("spec", [PLANS[0], FEW_PLANS[0]], ids=str)
@pytest.mark.parametrize("script", [contrast, grow, freeze, decide, penalise, look_alone])
def test_a_script(script: Callable[[Loop], None], spec: Spec) -> None:
    assert on_ranks(2, train, script, spec) == [[], []]


# -- what several ranks refuse -----------------------------------------------------------------------------------------


def a_term_of_weights_first(loop: Loop) -> None:
    with protrain.full_parameters(loop.model):
        term = sum(weight.square().sum() for weight in loop.model.parameters())
    (term + loop.loss(loop.ids(0))).backward()


def two_forwards(loop: Loop) -> None:
    (loop.loss(loop.ids(0)) - 0.5 * loop.loss(loop.ids(1))).backward()


def two_backwards(loop: Loop) -> None:
    for step in range(2):
        loop.loss(loop.ids(step)).backward()


def averaged_by(call: Callable[[list[Any]], Any]) -> Callable[[Loop], None]:
    """A script that averages gradients itself, as one without DistributedDataParallel does."""

    def script(loop: Loop) -> None:
        loop.loss(loop.ids(0)).backward()
        call([parameter.grad for parameter in loop.model.parameters()])

    return script


REFUSED: dict[str, tuple[Callable[[Loop], None], str]] = {
    "a term of weights first": (a_term_of_weights_first, "that is made of weights after the forward"),
    "two forwards": (two_forwards, "wrap a module whose forward makes all calls of the model and returns the loss"),
    "two backwards": (two_backwards, "pass accumulation=2 or more to protrain.wrap"),
    "all_reduce": (averaged_by(lambda grads: [dist.all_reduce(grad) for grad in grads]), "all ranks already"),
    "all_gather": (averaged_by(lambda grads: dist.all_gather([torch.empty(1)] * 2, grads[0])), "all ranks already"),
    "flatten": (averaged_by(_flatten_dense_tensors), "all ranks already"),  # as older loops do, to send all at once
}


def error_of(rank: int, name: str) -> str:
    """The error of a script that both ranks run."""
    model = Model()
    trained = wrap_under(FEW_PLANS[0], model, adamw(model), EXAMPLE, world_size=2)
    with pytest.raises(protrain.MisuseError) as raised:
        REFUSED[name][0](Loop(*trained, rank))
    trained[1].zero_grad()
    return str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_both_ranks_refuse(name: str) -> None:
    for error in on_ranks(2, error_of, name):
        assert REFUSED[name][1] in error


# -- an example --------------------------------------------------------------------------------------------------------


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


# -- generation --------------------------------------------------------------------------------------------------------


def generated(model: Any, rank: int, end: int | None, **way: Any) -> Tensor:
    """What ``rank`` generates. Rank 0 ends long before rank 1, at two tokens or where the token ``end`` comes."""
    model.eval()
    prompt = torch.randint(bits.VOCABULARY, (2, 3 + rank), generator=torch.Generator().manual_seed(rank))
    length = 2 if rank == 0 and end is None else 9
    tokens: Tensor = model.generate(
        prompt, max_new_tokens=length, do_sample=False, eos_token_id=end, pad_token_id=0, **way
    )
    model.train()
    return tokens


def generate_and_train(rank: int, spec: Spec, ends: list[int | None]) -> tuple[list[Tensor], float]:
    model, data = bits.make("llama"), bits.batches(2)
    wrapped, _ = wrap_under(spec, model, adamw(model), data[0], world_size=2)
    tokens = [generated(wrapped, rank, end, **way) for way in ({}, {"synced_gpus": False}) for end in ends]
    loss = default_loss(wrapped, data[rank])
    loss.backward()
    return tokens, loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [PLANS[0], FEW_PLANS[0]], ids=str)
def test_generated_tokens_are_those_of_one_process(spec: Spec) -> None:
    """Also where transformers' Trainer says that ranks need not wait for each other."""
    plain = bits.make("llama")
    ends = [None, int(generated(plain, 0, None)[0, -1])]
    assert generated(plain, 0, ends[1]).shape[1] < generated(plain, 1, ends[1]).shape[1], (
        "no rank ends before the other"
    )
    for rank, (tokens, loss) in enumerate(on_ranks(2, generate_and_train, spec, ends)):
        expected = [generated(plain, rank, end) for end in ends]
        assert all(torch.equal(*pair) for pair in zip(tokens, expected * 2, strict=True))
        assert loss == default_loss(plain, bits.batches(2)[rank]).item(), "the ranks are out of step"
