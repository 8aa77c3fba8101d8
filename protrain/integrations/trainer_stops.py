"""What a Trainer does when it is told to stop: it ends the step, saves one checkpoint and ends, on all ranks alike.

[Note: one decision] SIGINT, SIGTERM or SIGHUP may come to one rank alone, or to all at different moments of a step. A
handler only notes it. At the end of each backward, and before each batch of an evaluation, the ranks tell each other
what has come. So all of them save at the same step. Until the first step of ``train()`` has ended there is nothing to
save, and a signal ends it at once.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from signal import SIGINT, Signals
from typing import Any

from transformers.trainer_utils import SaveStrategy

from protrain.common.progress import heard, note
from protrain.common.signals import Stopped, stop_requests
from protrain.integrations.loader_workers import let_workers_stay
from protrain.integrations.trainer_saves import TrainerSaves

_ANSWER = "the training saves the step that runs and ends; a second signal ends it at once"


class TrainerStops(TrainerSaves):
    """The part of ProTrainMixin that heeds signals. All ranks come to each of its methods."""

    _requests: Any = None  # of train(), while it runs: StopRequests
    _saved_step = -1  # of its last checkpoint

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train. A signal that asks to stop ends it after the step that runs, once that is saved.

        Raises:
            KeyboardInterrupt: the signal was SIGINT, or a second one came, which ends the training at once.
            SystemExit: it was SIGTERM or SIGHUP. The status is what a shell makes of them: 128 and the signal's number.
        """
        try:
            answer = _ANSWER if self.args.process_index == 0 else ""
            with stop_requests(over_others=False, answer=answer) as self._requests, ExitStack() as self._first_step:
                self._first_step.enter_context(self._requests.raised())
                result = super().train(*args, **kwargs)
            self._end_if(self._told())  # since the last look, which nothing else heeds
            return result
        except Stopped as stopped:  # in the first step, or before
            raise _ended_by(self._requests.received) from stopped
        finally:
            self._requests, self._saved_step = None, -1

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, whose workers outlive signals."""
        return let_workers_stay(super().get_train_dataloader(*args, **kwargs))

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, whose workers outlive signals."""
        return let_workers_stay(super().get_eval_dataloader(*args, **kwargs))

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """A batch of an evaluation. One that is due in ``train()`` is left before it if a rank was told to stop."""
        if self.control.should_evaluate and self._told():
            raise Stopped
        return super().prediction_step(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do what is due after a step. If a rank was told to stop, save and end."""
        ranks = self._own_optimizer.ranks
        if ranks.requests is not self._requests:
            self._first_step.close()
            ranks.requests = self._requests
        if not (ranks.requests.of_all if ranks.several else ranks.requests.received):
            with suppress(Stopped):
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
                note(f"{Signals(stop).name} has stopped the training after step {step}, which {saved}")
            raise _ended_by(stop)


def _ended_by(stop: int) -> BaseException:
    return KeyboardInterrupt() if stop == SIGINT else SystemExit(128 + stop)
