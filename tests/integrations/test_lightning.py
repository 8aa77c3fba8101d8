"""Lightning's Trainer trains on ProTrain as it does without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.pool import on_ranks
from tests.engine.harness import assert_same
from tests.integrations.lightning_runs import (
    STEPS,
    Module,
    Run,
    assert_close,
    fit,
    fit_with_more_batches_on_rank,
    lightning,
    loader,
    norms_on_rank,
    protrain_strategy,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
def test_the_trainer_finds_the_strategy_by_name(tmp_path: Path) -> None:
    import protrain.integrations.lightning  # noqa: F401

    assert_close(fit(tmp_path, "protrain"), fit(tmp_path, "auto"))


@pytest.mark.slow
def test_a_fit_goes_on_from_a_checkpoint_that_was_made_without_protrain(tmp_path: Path) -> None:
    """Accumulation, clipping, a scheduler, logging over an epoch, and validation between steps."""
    arguments: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    plain = fit(tmp_path / "plain", "auto", **arguments)
    assert_close(fit(tmp_path / "ours", protrain_strategy(), **arguments), plain)
    half = {**arguments, "max_steps": STEPS // 2}
    fit(tmp_path / "half-plain", "auto", **half)
    expected, resumed = (
        fit(tmp_path / "resumed", strategy, resume=tmp_path / "half-plain" / "end.ckpt", **arguments)
        for strategy in ("auto", protrain_strategy())
    )
    assert len(resumed.losses) < len(plain.losses)
    assert_close(resumed, expected)


@pytest.mark.slow
def test_with_an_example_batch_validation_may_come_first(tmp_path: Path) -> None:
    strategy = protrain_strategy(example_batch=next(iter(loader())))
    sane = fit(tmp_path, strategy, num_sanity_val_steps=1)
    plain = fit(tmp_path, "auto", num_sanity_val_steps=1)
    assert_close(sane, plain)


@pytest.mark.slow
def test_the_trainer_on_two_processes(tmp_path: Path) -> None:
    """A callback reads weights between steps."""
    ours, other = on_ranks(2, norms_on_rank, tmp_path / "ours", True)
    [plain, norms], _ = on_ranks(2, norms_on_rank, tmp_path / "plain", False)
    assert ours[1] == other[1]
    assert len(norms) == len(plain.weights) * (1 + 3 * STEPS + 2)
    assert ours[1] == pytest.approx(norms, rel=1e-4)
    assert_close(ours[0], plain)
    assert_same(other[0].weights, ours[0].weights)


@pytest.mark.slow
def test_a_later_epoch_has_more_batches_in_a_step(tmp_path: Path) -> None:
    """Lightning's callback changes the number, of which several processes need to know the largest from the begin."""
    plain, ours = (on_ranks(2, fit_with_more_batches_on_rank, tmp_path, each)[0] for each in (False, True))
    assert_close(ours, plain)


@pytest.mark.slow
def test_fewer_devices_than_processes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    strategy = protrain_strategy()
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")]
    with pytest.raises(ValueError, match=r"devices=1.* does not match the world size"):
        strategy.setup_environment()


class Thaws(lightning.pytorch.callbacks.BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None: ...

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "64-true"}, "precision='64-true' is not one that ProTrain has"),
        ({"callbacks": [lightning.pytorch.callbacks.StochasticWeightAveraging(1e-3)]}, "Stochastic.*AveragedWeights"),
        *(
            ({"callbacks": [kind()]}, "callback EMAWeightAveraging .*AveragedWeights")
            for kind in [getattr(lightning.pytorch.callbacks, "EMAWeightAveraging", None)]
            if kind is not None  # it is newer than the oldest release that is tested
        ),
        ({"callbacks": [Thaws()]}, "callback Thaws adds parameters to the optimizer"),
    ],
)
def test_what_would_fail_later_is_refused_before_the_training(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, protrain_strategy(), **arguments)


@pytest.mark.slow
def test_manual_optimization_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Module, "automatic_optimization", False)
    with pytest.raises(ValueError, match=r"automatic optimization and one optimizer: use protrain\.wrap"):
        fit(tmp_path, protrain_strategy())


class Eventful(Module):
    """A module that leaves out a batch, and writes to its logger itself."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        if index == 2:
            return None
        loss = super().training_step(batch, index)
        self.logger.log_metrics({"mine": float(loss)}, step=self.global_step)
        return loss

    test_step = Module.validation_step

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if outputs:
            super().on_train_batch_end(outputs, batch, index)


@pytest.mark.slow
def test_all_that_one_trainer_does_with_a_module(tmp_path: Path) -> None:
    """Validation and a save before the first fit, and a second fit, which has an optimizer of its own."""

    def run(strategy: Any, folder: Path) -> Run:
        logger = lightning.pytorch.loggers.CSVLogger(folder)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=logger, log_every_n_steps=1,
            default_root_dir=folder, callbacks=[SavesAtStart()], enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, num_sanity_val_steps=0,
        )  # fmt: skip
        module = Eventful()
        trainer.validate(module, loader(), verbose=False)
        trainer.fit(module, loader(), loader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader(), loader())
        module.losses += trainer.test(module, loader(), verbose=False)[0].values()
        logged = [row["mine"] for row in logger.experiment.metrics if "mine" in row]
        assert_same(torch.load(folder / "begin.ckpt")["state_dict"], Eventful().state_dict())
        return Run(module.losses + logged, {name: value.clone() for name, value in module.state_dict().items()})

    class SavesAtStart(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(Path(trainer.default_root_dir) / "begin.ckpt")

    assert_close(run(protrain_strategy(), tmp_path / "ours"), run("auto", tmp_path / "plain"))


@pytest.mark.slow
def test_a_second_fit_needs_an_optimizer_of_the_same_groups(tmp_path: Path) -> None:
    class Grows(Module):
        fits = 0

        def configure_optimizers(self) -> Any:
            self.fits += 1
            parameters = list(self.parameters())
            return torch.optim.AdamW([{"params": parameters}] if self.fits == 1 else [{"params": parameters[:1]}])

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=protrain_strategy(), max_steps=1, logger=False,
        enable_progress_bar=False, default_root_dir=tmp_path, enable_model_summary=False,
        enable_checkpointing=False, limit_val_batches=0,
    )  # fmt: skip
    module = Grows()
    trainer.fit(module, loader())
    with pytest.raises(ValueError, match=r"wrapped with AdamW of 1 groups, and goes on with .* the same groups only"):
        trainer.fit(module, loader())
