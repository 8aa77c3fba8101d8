"""step_during_backward: the paper's updates inside backward give the bits of updates in step(), or refuse to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import BlockMode
from tests.engine.harness import CKPT, NONE, SWAP, Loop, Spec, adamw, assert_same, plain_run, states, wrap_under

SPECS = (
    Spec("all", "least", (NONE, CKPT)),
    Spec("some", "least", (SWAP, CKPT, NONE)),
    Spec("none", "least", (CKPT,), small=True),
    Spec("none", "least", (SWAP, NONE), small=True),
    Spec("none", "all", (NONE,)),
)
Batch = dict[str, Tensor]
Wrapped = tuple[nn.Module, ProTrainOptimizer]
Wrap = Callable[..., Wrapped]


@pytest.fixture
def wrapped(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], device: torch.device
) -> Callable[..., Wrapped]:
    def build(spec: Spec, *, during: bool, family: str = "gpt2", **options: Any) -> Wrapped:
        model = tiny_model(family)
        options["step_during_backward"] = during
        return wrap_under(spec, model, adamw(model), tiny_batch(), device=device, **options)

    return build


@pytest.mark.parametrize(
    ("family", "dtype", "specs"),  # both families have tied weights, used at the start and at the end
    [
        ("gpt2", torch.float32, SPECS[::2]),
        ("gpt2", torch.bfloat16, SPECS[1::2]),
        ("t5", torch.float32, SPECS[1::2]),
        ("t5", torch.bfloat16, SPECS[::2]),
    ],
)
def test_same_bits_as_steps_after_backward(
    wrapped: Wrap,
    tiny_model: Callable[..., nn.Module],
    tiny_batch: Callable[..., Batch],
    family: str,
    dtype: torch.dtype,
    specs: tuple[Spec, ...],
    device: torch.device,
) -> None:
    batches = [tiny_batch(seed) for seed in range(2)]
    expected, final = plain_run(lambda: tiny_model(family), batches, loop=Loop(), device=device, dtype=dtype)
    assert len(set(expected)) > 1, "it does not train"
    for spec in specs:
        model, optimizer = wrapped(spec, during=True, family=family, dtype=dtype)
        assert Loop().run(model, optimizer, batches) == expected, str(spec)
        assert_same(states(model, optimizer), final, where=str(spec))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_backward_makes_the_updates_with_its_own_learning_rate(
    wrapped: Wrap, tiny_batch: Callable[..., Batch], spec: Spec
) -> None:
    model, optimizer = wrapped(spec, during=True)
    initial = weights(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    loss = model(**tiny_batch()).loss
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = 100.0
    after_backward = weights(model)
    optimizer.step()
    after_step = weights(model)
    moved = max(float((after_backward[name] - value).abs().max()) for name, value in initial.items())
    assert moved == pytest.approx(1e-2, rel=0.1), "Adam's first step is as long as the learning rate"
    assert all(after_step[name].equal(value) for name, value in after_backward.items())


def test_a_skipped_step_is_an_error(wrapped: Wrap, tiny_batch: Callable[..., Batch]) -> None:
    results = []
    for skip in (False, True):
        model, optimizer = wrapped(SPECS[1], during=True)
        model(**tiny_batch()).loss.backward()
        if skip:
            with pytest.raises(
                MisuseError, match=r"backward\(\) before step\(\).*every step\(\) must be called; use .*n"
            ):
                model(**tiny_batch()).loss.backward()
        optimizer.step()
        with pytest.raises(MisuseError, match="without gradients"):
            optimizer.step()
        model(**tiny_batch(1)).loss.backward()
        optimizer.step()
        results.append(states(model, optimizer))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_after_a_failed_backward_zero_grad_begins_anew(
    wrapped: Wrap, tiny_batch: Callable[..., Batch], spec: Spec
) -> None:
    """What it had updated is a step; what comes next trains on."""
    model, optimizer = wrapped(spec, during=True)
    Loop().run(model, optimizer, [tiny_batch(0)])
    before = states(model, optimizer)
    # The first block's backward comes late: what lies behind it is updated by then.
    first = model.get_submodule("transformer.h.0")
    handle = first.register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**tiny_batch(1)).loss.backward()
    optimizer.zero_grad()
    handle.remove()
    between = states(model, optimizer)
    assert any(not torch.equal(between[name], before[name]) for name in before)
    losses = Loop().run(model, optimizer, [tiny_batch(2)] * 2)
    assert losses[-1] < losses[0]
    model(**tiny_batch(1)).loss.backward()
    optimizer.zero_grad()
    with pytest.raises(MisuseError, match=r"backward\(\) before step\(\)"):  # one that did not fail wants its step
        model(**tiny_batch(1)).loss.backward()


def test_clipping_is_an_error(wrapped: Wrap, tiny_batch: Callable[..., Batch]) -> None:
    model, optimizer = wrapped(SPECS[1], during=True)
    for _ in range(2):  # before and after a backward
        with pytest.raises(MisuseError, match="updates are made inside backward: wrap with step_during_backward=False"):
            optimizer.clip_grad_norm_(1.0)
        model(**tiny_batch()).loss.backward()
        optimizer.step()


def test_a_step_after_no_sync_alone_is_an_error(wrapped: Wrap, tiny_batch: Callable[..., Batch]) -> None:
    results = []
    for misuse in (False, True):
        model, optimizer = wrapped(SPECS[1], during=True, accumulation=2)
        quiet: Any = model.no_sync
        with quiet():
            model(**tiny_batch()).loss.backward()
        if misuse:
            with pytest.raises(
                MisuseError, match=r"step\(\) after no_sync\(\) only: run the last backward\(\) of a st"
            ):
                optimizer.step()
        model(**tiny_batch(1)).loss.backward()
        optimizer.step()
        results.append(states(model, optimizer))
    assert_same(results[1], results[0])


def enter_full_parameters(model: nn.Module, optimizer: ProTrainOptimizer, folder: Path) -> None:
    with protrain.full_parameters(model):
        pass


READS: dict[str, Callable[[nn.Module, ProTrainOptimizer, Path], Any]] = {
    "weights": lambda model, optimizer, folder: model.state_dict(),
    "states": lambda model, optimizer, folder: optimizer.state_dict(),
    "all parameters": enter_full_parameters,
    "a save": lambda model, optimizer, folder: protrain.save_checkpoint(folder, model, optimizer),
}


@pytest.mark.parametrize("spec", SPECS[:3:2], ids=str)
@pytest.mark.parametrize("what", READS)
def test_nothing_is_read_while_a_part_of_the_weights_is_updated(
    wrapped: Wrap, tiny_batch: Callable[..., Batch], what: str, spec: Spec, tmp_path: Path
) -> None:
    results, refused = [], []
    for reads in (False, True):
        model, optimizer = wrapped(spec, during=True)

        def read(*_: object, model: nn.Module = model, optimizer: ProTrainOptimizer = optimizer) -> None:
            """In the backward of the first block, after those of the others."""
            try:
                READS[what](model, optimizer, tmp_path)
            except MisuseError as error:
                refused.append(str(error))

        if reads:
            model.get_submodule("transformer.h.0").register_full_backward_hook(read)
        for seed in range(2):
            model(**tiny_batch(seed)).loss.backward()
            optimizer.step()
        results.append(states(model, optimizer))
    assert len(refused) == 2
    assert all("this backward has updated a part of the weights" in said for said in refused)
    assert not list(tmp_path.iterdir())
    assert_same(results[1], results[0])


class Block(nn.Module):
    """May use the weight of another module, and asks for no gradient of that."""

    def __init__(self, lender: nn.Linear | None = None) -> None:
        super().__init__()
        self.own, self.lender = nn.Linear(24, 24), lender

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.own(x))
        return hidden if self.lender is None else hidden + nn.functional.linear(x, self.lender.weight.detach())


class Borrowing(nn.Module):
    """Its first block uses the weight of the last module, whose gradient arrives long before that block's."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 24), nn.Linear(24, 24)
        self.blocks = nn.ModuleList([Block(self.leave), *(Block() for _ in range(3))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).square().mean()


@pytest.mark.parametrize("mode", [NONE, CKPT], ids=str)
@pytest.mark.parametrize("persist", ["all", "none"])
def test_a_weight_that_backward_needs_after_its_update_is_said(
    persist: str, mode: BlockMode, device: torch.device
) -> None:
    spec, batch = Spec(persist, "least", (mode,), small=True), (torch.ones(4, 8),)
    model = Borrowing()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), batch, device=device, step_during_backward=True)
    with pytest.raises(MisuseError, match=r"blocks.0 needs a weight that step_during_backward=True updated already"):
        wrapped(*batch).backward()
    model = Borrowing()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), batch, device=device)
    assert len(set(Loop().run(wrapped, optimizer, [batch] * 2))) == 2
