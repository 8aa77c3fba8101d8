"""Lightning's Trainer on ProTrain: ``strategy="protrain"``, which exists once this module is imported.

The strategy is that of DistributedDataParallel without the wrapper: processes, samplers and logging across ranks are
Lightning's, and model and optimizer are given to ``protrain.wrap``. Lightning finds strategies in a registry of its own
and looks for no entry points, hence the import.

A checkpoint with the state of an optimizer is a folder: a save of ``save_checkpoint``, and a file of Lightning with the
rest. The rest is written first, and the save names it. So a process that is killed at any moment leaves the checkpoint
that was there before, or a hidden folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from protrain.checkpoint.loading import load_checkpoint
from protrain.checkpoint.manifest import find_save, list_saves, read_manifest
from protrain.checkpoint.saving import has_plan, own_saves, save_checkpoint
from protrain.checkpoint.tensor_files import put_in_place
from protrain.engine.states.empty import empty_parameters
from protrain.engine.weights.state_hooks import first_rank_saves, reads_of_all
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.wrapping import wrap

_AVERAGES = "changes weights where they lie: call update() of protrain.AveragedWeights(module) in a callback instead"
_CALLBACKS = {  # by the name of the class, as not every release has all of them
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "BaseFinetuning": "adds parameters to the optimizer during the training: fit with all that is to be trained "
    "from its begin, or go on with a new module and Trainer from a checkpoint",
}
_FOLDER = "protrain_folder"  # the entry of a loaded checkpoint that says where model and optimizer are
_DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}


class _Steps(nn.Module):
    """The steps of a LightningModule as calls of a module, which is what ProTrain plans: a step may call any part.

    The steps that are run to find a plan log nothing.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if has_plan(self.module) else _unlogged(self.module):
            return getattr(self.module, step)(*args, **kwargs)


@contextmanager
def _unlogged(module: LightningModule) -> Iterator[None]:
    """Let nothing that ``module`` logs be heard, neither by ``log`` nor by a logger."""
    trainer, loggers = module.trainer, module.trainer.loggers
    vars(module)["log"] = lambda *_, **__: None
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        del vars(module)["log"]
        trainer.loggers = loggers


def _most_batches(trainer: Trainer) -> int:
    """The most batches of any step, also where a callback changes their number from epoch to epoch."""
    schedules = [each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]
    return max(trainer.accumulate_grad_batches, *(count for each in schedules for count in each.scheduling.values()), 1)


def _step(name: str, context: str) -> Any:
    """The step ``name`` of the strategy, in that ``context``: a call of the wrapped model, if there is one.

    Between steps hooks may read weights on several ranks, too. All ranks call them.
    """

    def run(self: ProTrainStrategy, *args: Any, **kwargs: Any) -> Any:
        if self._steps is not None and self.model is self._steps:
            self._reads.close()
            try:
                with getattr(self.precision_plugin, context)():
                    return self._steps(name, *args, **kwargs)
            finally:
                self._reads.enter_context(reads_of_all(self._steps))
        return getattr(super(ProTrainStrategy, self), name)(*args, **kwargs)

    return run


class ProTrainStrategy(DDPStrategy):
    """Lightning's ``Trainer(strategy="protrain")``.

    Precision, accumulation and device are those of the Trainer. A plan is made for the first training batch, before
    which nothing can be validated, so the sanity check of validation is left out. With ``example_batch``, a batch that
    is as long as any of the training, the plan is made when the fit begins.

    Args:
        example_batch: what the dataloader gives to ``training_step``.
        wrap_arguments: of ``protrain.wrap``, such as ``device_memory="24GiB"``.
    """

    model: Any  # of Lightning's strategy, as are the optimizers
    optimizers: Any

    def __init__(self, *, example_batch: Any = None, **wrap_arguments: Any) -> None:
        super().__init__()
        self._example_batch = example_batch
        self._wrap_arguments = wrap_arguments
        self._steps: _Steps | None = None
        self._reads = ExitStack()
        self._optimizer: ProTrainOptimizer  # once there are steps

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes > 1:  # as it announces processes in the environment
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Take the device of this process. Lightning looks whether there is one for each only where it starts them."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        super().setup_environment()

    def setup_distributed(self) -> None:
        """Start the processes' group, if there are several."""
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        """Create the optimizer and wrap it with the model, if the model is to be trained."""
        if self._steps is not None and self._steps.module is not self.lightning_module:
            self._steps = None
        if self.world_size == 1:
            trainer._accelerator_connector.use_distributed_sampler = False
        if self._steps is None and trainer.state.fn != TrainerFn.FITTING and self.world_size > 1:
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if self._steps is None:
                self._wrap(trainer)
            else:  # another fit begins with an optimizer of its own, as any does in Lightning
                self._optimizer.start_again(*self.optimizers)
                self.optimizers = [self._optimizer]
        if self._steps is None:
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
        else:
            self.model = self._steps
            self._reads.enter_context(reads_of_all(self._steps))
        self.setup_precision_plugin()

    def _wrap(self, trainer: Trainer) -> None:
        module = self.lightning_module
        if not module.automatic_optimization or len(self.optimizers) != 1:
            raise ValueError(
                "ProTrain trains LightningModules with automatic optimization and one optimizer: use "
                "protrain.wrap in a loop of your own where backward() is called outside of training_step"
            )
        for kind, callback in ((kind.__name__, each) for each in trainer.callbacks for kind in type(each).__mro__):
            if kind in _CALLBACKS:
                raise ValueError(f"callback {type(callback).__name__} {_CALLBACKS[kind]}")
        precision = self.precision_plugin.precision
        if precision not in _DTYPES:
            raise ValueError(f"precision={precision!r} is not one that ProTrain has: use bf16-mixed or 32-true")
        found: dict[str, Any] = {
            "device": self.root_device,
            "dtype": _DTYPES[precision],
            "accumulation": _most_batches(trainer),
        }
        with empty_parameters():  # in which parameters without memory can be converted
            self._steps = _Steps(self.precision_plugin.convert_module(module))
        if self._example_batch is None:
            trainer.num_sanity_val_steps = 0
        else:
            found["example_batch"] = ("training_step", self._example_batch, 0)
        with self.precision_plugin.train_step_context():
            _, self._optimizer = wrap(self._steps, self.optimizers[0], **(found | self._wrap_arguments))
        self.optimizers = [self._optimizer]

    training_step = _step("training_step", "train_step_context")
    validation_step = _step("validation_step", "val_step_context")
    test_step = _step("test_step", "test_step_context")
    predict_step = _step("predict_step", "predict_step_context")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights are not in a checkpoint until ``save_checkpoint`` knows what it is to hold."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of the optimizer for a checkpoint that is a file."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        return {} if has_plan(self.lightning_module) else inner.full_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder if ``checkpoint`` is of a training with a plan, and otherwise a file with all weights."""
        module = self.lightning_module
        if checkpoint.get("optimizer_states") and has_plan(module):
            self._save_folder(filepath, checkpoint)
            return
        with first_rank_saves(module, what="save_checkpoint() of Lightning's Trainer"):
            checkpoint["state_dict"] = module.state_dict() if self.is_global_zero else {}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_folder(self, path: Any, rest: dict[str, Any]) -> None:
        """Save in the folder ``path`` what each rank has of model and optimizer, and ``rest`` in a file.

        A new folder gets its name when it is complete. In one that is there, two files take turns.
        """
        if "://" in str(path):
            raise ValueError(
                f"{path} is a URL, and a checkpoint to resume from is a folder: give one that all ranks see"
            )
        ranks = self._optimizer.ranks
        ranks.meet("trainer.save_checkpoint()")
        folder = Path(path).absolute()
        place = ranks.of_first(folder if folder.is_dir() else folder.with_name(f".{folder.name}.tmp"))
        name = f"rest-{sum(int(save.name.partition('-')[0]) for save in list_saves(place)[-1:]) % 2}.pt"
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(rest, place / name)
        save = save_checkpoint(place, self.model, self._optimizer, extra=name, keep=1)
        if self.is_global_zero and place != folder:
            folder.unlink(missing_ok=True)  # a file, of a training without a plan
            put_in_place(place, folder)
        own_saves(self._optimizer).append(folder / save.name)

    def load_checkpoint(self, checkpoint_path: Any, **arguments: Any) -> dict[str, Any]:
        """What Lightning restores itself: all of a file, and the rest of a folder."""
        if not Path(checkpoint_path).is_dir():
            return super().load_checkpoint(checkpoint_path, **arguments)
        folder = Path(checkpoint_path).absolute()
        rest = folder / str(read_manifest(find_save(folder))["extra"])
        return super().load_checkpoint(rest, **arguments) | {_FOLDER: folder}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, but those that come with the state of an optimizer, which does not exist yet."""
        module = self.lightning_module
        if _FOLDER not in checkpoint:
            super().load_model_state_dict(checkpoint, strict)
        elif module.trainer.state.fn != TrainerFn.FITTING:
            if self._steps is None or self._steps.module is not module:
                raise ValueError(
                    f"{checkpoint[_FOLDER]} holds what each rank had in the training, and is read where this Trainer "
                    "has trained the module: elsewhere use a checkpoint with save_weights_only=True"
                )
            load_checkpoint(checkpoint[_FOLDER], self._steps, self._optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of the optimizer of a checkpoint. Lightning would move it to the device afterwards."""
        if _FOLDER in checkpoint:
            load_checkpoint(checkpoint[_FOLDER], self.model, self._optimizer)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """End what Lightning has begun. A wrapped model stays where it is."""
        if self._steps is None:
            super().teardown()
            return
        self._reads.close()
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()


StrategyRegistry.register("protrain", ProTrainStrategy, description="ProTrain", override=True)
