"""Steps of the Trainer that have the same bits on any number of ranks, wherever a training was saved and resumed.

Accelerate gives batch i of an epoch to rank i mod W. So W ranks with A micro-batches each take the W x A batches of a
step of one rank, in the order in which ProTrain adds their gradients. Two things are left to do.

[Note: keyed draws of the Trainer] What is drawn while a batch is made, and in its forward, follows from the seed and
the number of the batch. Afterwards the random state is what it was before. So all other draws, such as those of a
sampler or of GRPO's generation, are those of a Trainer without ProTrain.

[Note: losses counted globally] The Trainer divides a loss by what all ranks count and multiplies it by W, as DDP takes
the mean over ranks. That rounds where W is no power of two. If a loss is known to be computed so, it is not multiplied
here, and ProTrain takes the sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from transformers import Trainer

from protrain.forward.module_state import seed_of

# The modules whose `compute_loss` counts as `args.average_tokens_across_devices` says, or leaves it to the Trainer to
# divide by `current_gradient_accumulation_steps`.
_KNOWN_LOSSES = ("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")

_Base: Any = object  # the type checker is not to ask for what the mixin uses of the Trainer


class TrainerSteps(_Base):
    """The part of ProTrainMixin that makes steps independent of the number of ranks."""

    _model_computes_loss = False  # in place of what TRL's SFTTrainer computes of the head's weight
    _train_loader: Any = None  # the last one
    _micro_batch = 0  # the number that the next one has in its step on this rank
    _random_state: torch.Tensor | None = None  # of before the batch that is being made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # SFTTrainer would multiply with the head up to four times and wait for the GPU three times in each micro-batch.
        is_sft = type(self).compute_loss.__module__ == "trl.trainer.sft_trainer"
        if is_sft and self.args.loss_type == "nll" and not getattr(self, "aux_loss_enabled", False):
            own = self.compute_loss_func or self.label_smoother
            self._model_computes_loss = not own and _shifts_labels(self.model)
        if self._model_computes_loss:
            self.__dict__["compute_loss"] = self._loss_of_model  # before that of the class

    def _loss_of_model(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The mean over counted tokens, as SFTTrainer has it, without its metrics. It is called as ``compute_loss``."""
        return Trainer.compute_loss(self, model, {**inputs, "use_cache": False}, *args, **kwargs)

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with keyed draws: see [Note: keyed draws of the Trainer]."""
        loader = super().get_train_dataloader(*args, **kwargs)
        if isinstance(loader, DataLoaderShard) and loader.batch_sampler is not None:
            # Loaders refuse another sampler once they are made.
            object.__setattr__(loader.base_dataloader, "batch_sampler", KeyedBatches(loader.batch_sampler, self))
        self._train_loader = loader
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of the next step."""
        self._micro_batch = 0
        samples = super().get_batch_samples(*args, **kwargs)
        self._end_draws()
        return samples

    def compute_loss_context_manager(self) -> ExitStack:
        """Compute the loss with keyed draws, but not in an evaluation: see [Note: keyed draws of the Trainer]."""
        stack: ExitStack = super().compute_loss_context_manager()
        if self.model.training:
            stack.enter_context(torch.random.fork_rng([self.args.device] if self.args.device.type == "cuda" else []))
            torch.manual_seed(self._seed_of(self.state.global_step, self._micro_batch))
            self._micro_batch += 1
        return stack

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a forward and a backward, and return the loss that the Trainer logs: see [Note: losses counted globally].

        Where the Trainer divides by the number of micro-batches, as for a mean of each, it gets that of all ranks.
        """
        if self._reduction == "mean":
            return super().training_step(*args, **kwargs)
        steps, ranks = getattr(self, "current_gradient_accumulation_steps", 1), self.args.world_size
        self.current_gradient_accumulation_steps = steps * ranks
        self.args.average_tokens_across_devices = False  # all ranks have counted, so it only says whether to multiply
        try:
            return super().training_step(*args, **kwargs) * ranks
        finally:
            self.current_gradient_accumulation_steps = steps
            self.args.average_tokens_across_devices = True

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load random states if as many ranks have saved theirs. Otherwise some would draw what others do not."""
        if checkpoint is None or len([*Path(checkpoint).glob("rng_state*.pth")]) == self.args.world_size:
            super()._load_rng_state(checkpoint)

    @property
    def _reduction(self) -> str:
        """The reduction of gradients over ranks that ``wrap`` is to have."""
        known = type(self).compute_loss.__module__ in _KNOWN_LOSSES and self.compute_loss_func is None
        wanted = self._wrap_arguments.get("gradient_reduction", "sum") == "sum"
        return "sum" if known and wanted and self.args.average_tokens_across_devices else "mean"

    def _seed_of(self, period: int, number: int, *purpose: int) -> int:
        """The seed for batch ``number`` of this rank in ``period``, a step or an epoch."""
        return seed_of(self.args.seed, period, number * self.args.world_size + self.args.process_index, *purpose)

    def _end_draws(self) -> None:
        """Go back to the random state of before the batch that was made."""
        if self._random_state is not None:
            torch.set_rng_state(self._random_state)
            self._random_state = None


def _shifts_labels(model: Any) -> bool:
    """Whether the loss of ``model`` is transformers' usual one, which compares each output with the next label."""
    forward = type(getattr(model, "get_base_model", lambda: model)()).forward
    return "self.loss_function(" in inspect.getsource(forward)  # BartForCausalLM compares with the label at its place


class KeyedBatches:
    """A batch sampler that seeds torch's CPU generator before each batch. Otherwise it is as ``batch_sampler`` is."""

    def __init__(self, batch_sampler: Any, trainer: TrainerSteps) -> None:
        self.batch_sampler, self._trainer = batch_sampler, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "batch_sampler"), name)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        trainer, epoch = self._trainer, int(self._trainer.state.epoch or 0)
        for number, batch in enumerate(self.batch_sampler):
            trainer._random_state = torch.get_rng_state()
            # The last number tells these seeds from those of forwards.
            torch.default_generator.manual_seed(trainer._seed_of(epoch, number, 1))
            yield batch
            trainer._end_draws()
