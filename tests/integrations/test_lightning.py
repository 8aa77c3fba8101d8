"""Lightning's Trainer and Fabric train on ProTrain as they do without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pool import on_ranks
from tests.integrations.lightning_runs import (
    STEPS,
    Module,
    Run,
    fit,
    fit_on_rank,
    loader,
    protrain_fabric,
    protrain_strategy,
    run_fabric,
    run_fabric_on_rank,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_close(ours: Run, plain: Run) -> None:
    """The first losses are the same bits, and later ones differ by the rounding of torch's own AdamW."""
    assert ours.losses[0] == plain.losses[0]
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    assert ours.weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        assert ours.weights[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.slow
def test_the_trainer_finds_the_strategy_by_name(tmp_path: Path) -> None:
    import protrain.integrations.lightning  # noqa: F401

    assert_close(fit(tmp_path, "protrain"), fit(tmp_path, "auto"))


@pytest.mark.slow
def test_a_fit_goes_on_from_the_checkpoint_of_the_other(tmp_path: Path) -> None:
    """Accumulation, clipping, a scheduler, logging over an epoch, and validation between steps."""
    arguments: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    plain = fit(tmp_path / "plain", "auto", **arguments)
    assert_close(fit(tmp_path / "ours", protrain_strategy(), **arguments), plain)
    half = {**arguments, "max_steps": STEPS // 2}
    fit(tmp_path / "half-plain", "auto", **half)
    fit(tmp_path / "half-ours", protrain_strategy(), **half)
    expected = fit(tmp_path / "resumed", "auto", resume=tmp_path / "half-plain" / "end.ckpt", **arguments)
    for strategy, source in ((protrain_strategy(), "half-plain"), ("auto", "half-ours")):
        resumed = fit(tmp_path / "resumed", strategy, resume=tmp_path / source / "end.ckpt", **arguments)
        assert len(resumed.losses) < len(plain.losses)
        assert resumed.losses == pytest.approx(expected.losses, rel=1e-4)
        for name, value in expected.weights.items():
            assert resumed.weights[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.slow
def test_with_an_example_batch_validation_may_come_first(tmp_path: Path) -> None:
    strategy = protrain_strategy(example_batch=next(iter(loader())))
    sane = fit(tmp_path, strategy, num_sanity_val_steps=1)
    plain = fit(tmp_path, "auto", num_sanity_val_steps=1)
    assert_close(sane, plain)


@pytest.mark.slow
def test_mixed_precision_is_the_type_of_the_weights(tmp_path: Path) -> None:
    run = fit(tmp_path, protrain_strategy(), precision="bf16-mixed")
    assert {value.dtype for value in run.weights.values()} == {torch.bfloat16}
    assert run.losses == pytest.approx(fit(tmp_path, "auto", precision="bf16-mixed").losses, rel=0.1)
    with pytest.raises(ValueError, match="precision='64-true' is not one that ProTrain has"):
        fit(tmp_path, protrain_strategy(), precision="64-true")


@pytest.mark.slow
def test_the_trainer_on_two_processes(tmp_path: Path) -> None:
    def two(name: str, on_protrain: bool, resume: Path | None = None) -> list[Run]:
        found: list[Run] = on_ranks(2, fit_on_rank, tmp_path / name, on_protrain, resume)
        return found

    plain, ours = two("plain", False), two("ours", True)
    for mine, theirs in zip(ours, plain, strict=True):
        assert_close(mine, theirs)
    for name, value in ours[0].weights.items():
        assert torch.equal(ours[1].weights[name], value), name
    alone = fit(tmp_path / "alone", "auto", resume=tmp_path / "ours" / "end.ckpt")
    for name, value in ours[0].weights.items():
        assert torch.equal(alone.weights[name], value), name


@pytest.mark.slow
def test_fabric(tmp_path: Path) -> None:
    plain = run_fabric(tmp_path / "plain", "auto")
    ours = run_fabric(tmp_path / "ours", protrain_fabric())
    assert_close(ours, plain)
    for source, strategy in (("plain", protrain_fabric()), ("ours", "auto")):
        resumed: Any = run_fabric(tmp_path / "resumed", strategy, resume=tmp_path / source)
        assert resumed.losses == pytest.approx(plain.losses[4:], rel=1e-4)


@pytest.mark.slow
def test_fabric_on_two_processes(tmp_path: Path) -> None:
    plain = on_ranks(2, run_fabric_on_rank, tmp_path / "plain", False)
    ours = on_ranks(2, run_fabric_on_rank, tmp_path / "ours", True)
    for mine, theirs in zip(ours, plain, strict=True):
        assert_close(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("fabric", [False, True])
def test_fewer_devices_than_processes_are_named(fabric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    strategy = protrain_fabric() if fabric else protrain_strategy()
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")]
    with pytest.raises(ValueError, match=r"2 processes were started .* given 1: pass devices=2"):
        strategy.setup_environment()


@pytest.mark.slow
def test_manual_optimization_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Module, "automatic_optimization", False)
    with pytest.raises(ValueError, match="automatic optimization and one optimizer: use Fabric"):
        fit(tmp_path, protrain_strategy())
