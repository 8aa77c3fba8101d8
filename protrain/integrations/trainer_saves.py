"""Checkpoints and stops of the Trainer: what of a checkpoint is ProTrain's, which are whole, and what a signal does.

``checkpoint-N/protrain`` holds weights, masters and moments, as ``protrain.save_checkpoint`` writes them: each rank its
own, and nothing is gathered. The other files are the Trainer's. The model's weights among them are written by
``protrain.export``, one parameter after the other, where transformers would write the same tensors.

[Note: whole checkpoints] The Trainer fills ``checkpoint-N`` in place, and writes its own state last. So a checkpoint is
whole if that state can be read and all files of ProTrain's save are there. What an earlier run has left under the same
number is deleted before a save, as it would pass for the end of this one.

[Note: one decision] SIGINT, SIGTERM or SIGHUP may come to one rank alone, or to all at different moments of a step. A
handler only notes it. At the end of each backward, and before each batch of an evaluation, the ranks tell each other
what has come. So all of them save at the same step. Until the first step of ``train()`` has ended there is nothing to
save, and signals have the handlers that they had before.

[Note: workers of a loader] torchrun and terminals send a signal to a whole group of processes. The training ends its
step all the same, for which it may need more batches, and torch raises an error in it as soon as a signal has killed a
worker. So workers outlive the signals that tell their training to stop.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from signal import SIG_BLOCK, SIGHUP, SIGINT, SIGTERM, Signals, pthread_sigmask, sigwaitinfo
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, Trainer, TrainerState, __version__
from transformers.trainer_utils import SaveStrategy

from protrain.checkpoint.export import has_adapter
from protrain.checkpoint.manifest import STATES, check_files, find_save, random_state, read_manifest, set_random_state
from protrain.checkpoint.saving import has_plan
from protrain.common.adapters import is_peft_model
from protrain.common.errors import warn_user
from protrain.common.progress import heard, print_line
from protrain.common.signals import stop_requests
from protrain.distributed.agreement import raised_on_all
from protrain.distributed.joining import join
from protrain.engine.weights.state_hooks import first_rank_saves
from protrain.public import CheckpointError, export, load_checkpoint, save_checkpoint

_ANSWER = "the training saves the step that runs and ends; a second signal ends it at once"
_EXPORTED = "exported"  # a folder in it while the model's weights are written

# The type checker sees what the mixin uses of the Trainer, which stands behind it among the bases of a class.
_Base: Any = Trainer if TYPE_CHECKING else object


class _Stopped(KeyboardInterrupt):
    """An evaluation is left, as the training is to stop."""


class TrainerSaves(_Base):
    """The part of ProTrainMixin that saves, loads and heeds signals. All ranks come to each of its methods."""

    def _whole(self) -> torch.nn.Module:
        """What computes the loss: the model, or a loss around it that has weights of its own (sentence-transformers).

        Raises:
            ValueError: there are several losses, of which each step calls another.
        """
        loss = getattr(self, "loss", None)
        if isinstance(loss, dict):
            raise ValueError("ProTrain plans one loss, not a dict of several: train with one loss at a time")
        return loss if isinstance(loss, torch.nn.Module) else self.model

    @property
    def _own_optimizer(self) -> Any:
        """The optimizer of ProTrain, without what Accelerate has put around it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    _requests: Any = None  # of train(), from the end of its first step: StopRequests
    _saved_step = -1  # of its last checkpoint

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train. ``resume_from_checkpoint=True`` goes on from the newest checkpoint that is whole.

        A signal that asks to stop ends it after the step that runs, once that is saved. In the first step it does what
        it does in any script.

        Raises:
            CheckpointError: no checkpoint in the output folder is whole, or the one that is named is not.
            KeyboardInterrupt: the signal was SIGINT, or a second one came, which ends the training at once.
            SystemExit: it was SIGTERM or SIGHUP. The status is what a shell makes of them: 128 and the signal's number.
        """
        first = self.args.process_index == 0
        try:
            with ExitStack() as self._handlers:
                if resume_from_checkpoint is True:
                    found = _newest(Path(self.args.output_dir)) if first else None
                    resume_from_checkpoint = join(None).of_first(found) or True  # then the Trainer says what is wrong
                result = super().train(resume_from_checkpoint, *args, **kwargs)
            self._end_if(self._told())  # since the last look, which nothing else heeds
            return result
        finally:
            self._requests, self._saved_step = None, -1

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the model. Before transformers 5.23 the first rank alone comes to ``_save``, so the others go there."""
        if not self.args.should_save and [int(part) for part in __version__.split(".")[:2]] < [5, 23]:
            self._save(output_dir)
        super().save_model(output_dir, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model. All ranks come here, and the first one writes."""
        if state_dict is None and self._whole() is self.model and _is_saved_as_it_is(self.model):
            self._save_by_export(Path(output_dir or self.args.output_dir))
            return
        card = getattr(self.model, "model_card_data", None)
        if card is not None and self.args.world_size > 1:
            card.generate_widget_examples = False  # of which sentence-transformers computes embeddings on one rank
        with first_rank_saves(self.model, what="save_model()"):
            if self.args.should_save:
                super()._save(output_dir, state_dict)

    def _save_by_export(self, folder: Path) -> None:
        """Save the model, of which no rank holds more than one parameter and a file of about 256 MiB."""
        self._own_optimizer.ranks.meet("save_model()")
        if self.args.should_save:
            super()._save(str(folder), {})  # everything but the weights, for which it writes an empty file
            shutil.rmtree(folder / _EXPORTED, ignore_errors=True)  # of a killed process
        export(self.model, folder / _EXPORTED)
        if self.args.should_save:
            weights = f"{'adapter_model' if has_adapter(self.model) else 'model'}*.safetensors*"
            for path in folder.glob(weights):  # the empty file, and what an earlier save has left
                path.unlink()
            for path in (folder / _EXPORTED).glob(weights):
                path.replace(folder / path.name)
            shutil.rmtree(folder / _EXPORTED)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save what ProTrain has, and the Trainer's scheduler in the Trainer's file."""
        if self.args.should_save:
            Path(output_dir, TRAINER_STATE_NAME).unlink(missing_ok=True)  # see [Note: whole checkpoints]
            shutil.rmtree(Path(output_dir, STATES), ignore_errors=True)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))
        save_checkpoint(Path(output_dir, STATES), self._whole(), self._own_optimizer, keep=1, base=self._base())

    def _save_rng_state(self, *args: Any, **kwargs: Any) -> None:
        """Save random states, and wait for those of all ranks: the next file makes the checkpoint whole."""
        super()._save_rng_state(*args, **kwargs)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *_: Any, **__: Any) -> None:
        """Refuse a checkpoint that is not whole. Its weights are loaded with the states, once the model is wrapped."""
        with raised_on_all(join(None)):
            _check(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what ``_save_optimizer_and_scheduler`` has saved."""
        if checkpoint is not None:
            self._load_states(checkpoint)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))
        super()._load_optimizer_and_scheduler(checkpoint)  # finds no optimizer.pt; classes of TRL load more

    def _load_best_model(self) -> None:
        """Load the best weights, from ProTrain's save if there is one, of which each rank reads what it has."""
        if Path(self.state.best_model_checkpoint, STATES).is_dir():
            self._load_states(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _load_states(self, checkpoint: str) -> None:
        """Load what ProTrain has saved, but no random states: the Trainer loads those of its own, and later."""
        before = random_state()
        load_checkpoint(Path(checkpoint, STATES), self._whole(), self._own_optimizer, base=self._base())
        set_random_state(before)

    def _base(self) -> str | None:
        """The name for what an adapter was added to: as with peft's own files, nobody checks that it is the same."""
        return "the Trainer's model" if has_adapter(self.model) else None

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, whose workers outlive signals."""
        return _let_workers_stay(super().get_train_dataloader(*args, **kwargs))

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, whose workers outlive signals."""
        return _let_workers_stay(super().get_eval_dataloader(*args, **kwargs))

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """A batch of an evaluation. One that is due in ``train()`` is left before it if a rank was told to stop."""
        if self.control.should_evaluate and self._told():
            raise _Stopped
        return super().prediction_step(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do what is due after a step. If a rank was told to stop, save and end."""
        ranks = self._own_optimizer.ranks
        if self._requests is None:
            answer = _ANSWER if self.args.process_index == 0 else ""
            self._requests = ranks.requests = self._handlers.enter_context(stop_requests(answer))
        if not (ranks.requests.of_all if ranks.several else ranks.requests.received):
            with suppress(_Stopped):
                super()._maybe_log_save_evaluate(*args, **kwargs)
                return
        self.control.should_evaluate = False
        is_saved = self._saved_step == self.state.global_step
        self.control.should_save = self.args.save_strategy != SaveStrategy.NO and not is_saved
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._end_if(self._told())  # by now the first rank has saved

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        self._saved_step = self.state.global_step

    def _told(self) -> int:
        """The signal that has come to a rank by now, or 0. It is the same on all ranks."""
        if self._requests is None:
            return 0
        return max(self._own_optimizer.ranks.all_values(self._requests.received, "whether to stop"))

    def _end_if(self, stop: int) -> None:
        """Raise what the signal ``stop`` asks for, if it is one."""
        if stop:
            step = self.state.global_step
            saved = f"checkpoint-{step} has" if self._saved_step == step else "is not saved"
            with heard(self.args.process_index == 0):
                print_line(f"{Signals(stop).name} has stopped the training after step {step}, which {saved}")
            raise KeyboardInterrupt if stop == SIGINT else SystemExit(128 + stop)


def _is_saved_as_it_is(model: torch.nn.Module) -> bool:
    """Whether ``model`` is wrapped, and ``protrain.export`` writes the same tensors of it as ``save_pretrained``.

    Both write the same tensors of an adapter of peft, and of a model of transformers whose weights have the names in a
    saved folder that they have in the model.
    """
    parameters = dict(model.named_parameters())
    if not has_plan(model):
        return False
    if is_peft_model(model):
        return [*getattr(model, "peft_config", {})] == ["default"]
    if not isinstance(model, PreTrainedModel) or has_adapter(model) or getattr(model, "hf_quantizer", None):
        return False
    if model._keys_to_ignore_on_save:
        return False
    here: Any = {name: torch.empty(each.shape, device="meta") for name, each in parameters.items()}
    there = revert_weight_conversion(model, dict(here))
    return {name: each.shape for name, each in there.items()} == {name: each.shape for name, each in here.items()}


def _newest(folder: Path) -> str | None:
    """The whole checkpoint in ``folder`` with the highest number, if there is one. Warns of others that are newer."""
    numbers = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*")}
    for number in sorted(filter(str.isdecimal, numbers), key=int, reverse=True):
        try:
            _check(numbers[number])
            return str(numbers[number])
        except CheckpointError as error:
            warn_user(f"resume_from_checkpoint=True goes back to an older checkpoint: {error}")
    return None


def _check(checkpoint: Path) -> None:
    """Raise a CheckpointError unless ``checkpoint`` is whole. Its large files are not read."""
    try:
        TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if (checkpoint / STATES).exists():
            return check_files(find_save(checkpoint / STATES), read_manifest(find_save(checkpoint / STATES)))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint} was not saved to its end, or is damaged: {error}") from None
    raise CheckpointError(
        f"{checkpoint} has no {STATES}/ with the optimizer's state, so it is of a Trainer without ProTrain, of "
        "save_only_model=True or of an earlier version: begin a new training with its model, by from_pretrained"
    )


def _let_workers_stay(loader: Any) -> Any:
    """``loader``, whose workers are ended by the process that has started them, and by no other's signals."""
    own = getattr(loader, "base_dataloader", loader)  # without what Accelerate has put around it
    if getattr(own, "num_workers", 0):
        own.worker_init_fn = partial(_stay, own.worker_init_fn)
    return loader


def _stay(begin: Callable[[int], None] | None, worker: int) -> None:
    """What ``worker`` does first, before what it was to ``begin`` with."""
    pthread_sigmask(SIG_BLOCK, [SIGINT, SIGHUP, SIGTERM])
    Thread(target=_end_with_training, name="protrain-end", daemon=True).start()
    if begin is not None:
        begin(worker)


def _end_with_training() -> None:
    """End this worker by SIGTERM of the training, which sends that to a worker that hangs."""
    while sigwaitinfo([SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
