"""The Trainer of transformers, and those of TRL and sentence-transformers that inherit from it, on ProTrain.

    class SFT(ProTrainMixin, SFTTrainer): ...

It is a mixin and no callback, as callbacks are heard too late: the Trainer moves the model to the GPU when it is made,
and puts DistributedDataParallel around it before training begins. A mixin has all it takes: the optimizer is wrapped
where the Trainer creates it, from its own parameter groups, and what ranks must do together when they save, they do.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from protrain.checkpoint.manifest import random_state, set_random_state
from protrain.common import batch as batches
from protrain.common.errors import PlanError, warn_user
from protrain.distributed.joining import announced_processes
from protrain.engine.weights.state_hooks import reads_of_all
from protrain.forward.compilation import replace_attributes
from protrain.integrations.accelerate import (
    first_dtype,
    leave_model,
    mix_precision,
    precision_of,
    refuse_precision,
)
from protrain.integrations.longest import generate_longest, longest_row
from protrain.integrations.trainer_saves import TrainerSaves
from protrain.integrations.trainer_steps import TrainerSteps
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.validate import choose_dtype
from protrain.wrapping import wrap

_PROMPTS = 1000  # of which the plan is made for the longest one


class _Called(Exception):
    """The model was called, with the positional and the named arguments that the exception holds."""


class ProTrainMixin(TrainerSteps, TrainerSaves):
    """Makes a Trainer train with ProTrain. It stands before the Trainer among the bases of a class.

    Precision, accumulation, compilation and device are those of the training arguments. Without ``bf16=True`` weights
    keep the type of the model's first one. Under torchrun the states are sharded over all processes.

    Args:
        args: of the Trainer.
        protrain: arguments of ``protrain.wrap``, such as ``{"device_memory": "24GiB"}``.
        kwargs: of the Trainer.
    """

    _wrap_defaults: Mapping[str, Any] = MappingProxyType({})  # those of a class that on_protrain has made

    def __init__(self, *args: Any, protrain: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._wrap_arguments = {**self._wrap_defaults, **(protrain or {})}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be combined, before the model is touched."""
        _check(self.args)
        super().create_accelerator_and_postprocess(*args, **kwargs)
        if self.args.data_seed is None:  # for which Accelerate would take torch's seed of this moment
            self.accelerator.dataloader_config.data_seed = self.args.seed
        for name in ("fsdp", "deepspeed"):
            if getattr(self.args, name) or getattr(self, f"is_{name}_enabled"):  # also by `accelerate launch`
                raise ValueError(f"{name} shards the model, as ProTrain does: switch it off")

    def _move_model_to_device(self, *_: Any, **__: Any) -> None:
        """Leave the model where it is: ProTrain moves what the plan has on the device."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The Trainer's optimizer, wrapped together with its model."""
        super().create_optimizer(*args, **kwargs)
        if not isinstance(self._own_optimizer, ProTrainOptimizer):
            _refuse_losses_of_liger(self)
            whole = self._whole()
            self._cast_reference()
            found = {
                "device": self.args.device,
                "dtype": self._trained_dtype(),
                "accumulation": self.args.gradient_accumulation_steps,
                "compile": self.args.torch_compile,
                "gradient_reduction": self._reduction,
                "progress": not self.args.disable_tqdm,
            }
            # Another loss reads logits in each step, or takes the labels away, so that the model has no loss.
            usual = type(self).compute_loss is Trainer.compute_loss or self._model_computes_loss
            if not usual or self.label_smoother or self.compute_loss_func:
                found["chunked_loss"] = False
            if "example_batch" not in self._wrap_arguments:
                found["example_batch"] = self._largest_batch(whole)
            if precision_of(self.args) == "bf16":
                mix_precision(self.accelerator, self.model, whole)
            try:
                _, wrapped = wrap(whole, self.optimizer, **(found | self._wrap_arguments))
            except PlanError as error:
                if not self.args.auto_find_batch_size or not error.fitting_batch:
                    raise
                # For these words in a RuntimeError all versions of Accelerate try a smaller batch.
                raise RuntimeError(f"As with CUDA out of memory. {error}") from None
            # To place the state on a device, Accelerate would take the whole of it on every rank.
            self.optimizer: Any = self.accelerator.prepare_optimizer(wrapped, device_placement=False)
            self.optimizer._is_accelerate_prepared = True
            self._let_callbacks_read(whole)
            self.model.__dict__.update(
                {name: vars(whole)[name] for name in ("no_sync", "zero_grad", "_is_accelerate_prepared")}
            )
            leave_model(self.accelerator, self.model)
            self.accelerator.clip_grad_norm_ = self._clip_grad_norm  # which early versions of transformers do not call
        return self.optimizer

    def _trained_dtype(self) -> torch.dtype:
        return torch.bfloat16 if precision_of(self.args) == "bf16" else first_dtype(self.model)

    def _cast_reference(self) -> None:
        """Let TRL's reference begin with the weights of the model, rounded to the type in which that is trained.

        Otherwise the two would differ before the first step, where DPO's loss is log 2. A reference that follows the
        model keeps its type, as it would lose small moves in bf16.
        """
        reference = getattr(self, "ref_model", None)
        if reference is None or getattr(self.args, "sync_ref_model", False):
            return
        dtype = choose_dtype(self._wrap_arguments.get("dtype", self._trained_dtype()), self.args.device)
        if dtype != first_dtype(self.model) == first_dtype(reference):
            for parameter in reference.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)

    def _let_callbacks_read(self, whole: nn.Module) -> None:
        """Let callbacks read weights on several ranks too, as those do that average them. All ranks call them."""
        call_event = self.callback_handler.call_event

        def call(*args: Any, **kwargs: Any) -> Any:
            with reads_of_all(whole):
                return call_event(*args, **kwargs)

        self.callback_handler.call_event = call

    def _largest_batch(self, whole: nn.Module) -> Any:
        """The arguments that ``whole`` gets in a step of the longest rows, or None where these are not known."""
        if self.train_dataset is None:
            return None
        before = random_state()
        try:
            loader = self.get_train_dataloader() if self._train_loader is None else self._train_loader
            twin = self._twin()
            collate = self._collator_of(loader, twin)
            row = longest = longest_row(loader.dataset)
            if row is None and hasattr(self, "generation_config"):  # of TRL, whose rows are prompts
                row = max(islice(loader.dataset, _PROMPTS), key=lambda row: len(str(row)))
            # The batch of a loader may be cut into several: GRPO's holds all rows for which it generates at once.
            count = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or self.args.train_batch_size
            batch = [dict(row) for _ in range(count)] if row else []
            largest = twin._call_of(whole, collate(batch)) if collate is not None and batch else None
        finally:
            set_random_state(before)
        if self.args.process_index == 0 and (largest is None or longest is None):
            basis = "the first batch" if largest is None else "a prompt that seems long"
            warn_user(
                f"nobody knows how long rows will be, so the plan is made for {basis}, and a much longer batch may be "
                'refused in the middle of the training for want of memory: pass protrain={"example_batch": batch}, '
                "arguments of the model that are as long as any will be"
            )
        return largest

    def _collator_of(self, loader: Any, twin: ProTrainMixin) -> Callable[[list[Any]], Any] | None:
        """A copy of the collator of ``loader``, as collators may draw from generators of their own.

        In the copy ``twin`` stands for this trainer. None if the collator holds something that cannot be copied.
        """
        known = {id(each): each for each in (self.processing_class, *self.model.modules())} | {id(self): twin}
        try:
            copied: Callable[[list[Any]], Any] = copy.deepcopy(loader.collate_fn, known)
        except Exception:  # whatever a class of the user raises
            return None
        return copied

    def _twin(self) -> ProTrainMixin:
        """A Trainer that shares everything with this one but its counters and records.

        Trainers count and record what they prepare and compute, and the batch that is planned for is not trained on.
        """
        twin = copy.copy(self)
        twin.__dict__.update(_apart(vars(self)))
        twin.state = copy.copy(self.state)
        if hasattr(self, "reward_funcs"):  # TRL's, whose functions are the user's
            twin.reward_funcs = [each if isinstance(each, nn.Module) else _no_reward for each in self.reward_funcs]
        return twin

    def _call_of(self, whole: nn.Module, batch: Any) -> Any:
        """The arguments with which a step of ``batch`` calls ``whole``, with all that Trainers add to a batch.

        A Trainer that first generates what it trains on, as GRPO does, is given the longest that may be generated.

        Raises:
            ValueError: the Trainer calls its own loss as the model's forward, so the arguments are none of the model.
        """
        forward = whole.forward
        modules = [each for each in (self.model, *vars(self).values()) if isinstance(each, nn.Module)]
        generating = [each for each in modules if hasattr(each, "generate")]  # also a teacher
        put_back = replace_attributes(
            [(whole, "forward", forward), *((each, "generate", partial(generate_longest, each)) for each in generating)]
        )

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Called(args, kwargs)

        hook = whole.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
        try:
            # The Trainer counts labels on all ranks, which a rank alone cannot.
            self.training_step(
                self.model, batch, torch.ones((), device=self.args.device) if "labels" in batch else None
            )
        except _Called as called:
            if whole.forward != forward:
                raise ValueError(
                    f"{type(self).__name__} calls its loss in place of the model's forward, so the largest batch is "
                    'not known: pass protrain={"example_batch": batch}, arguments of the model itself that are as long '
                    "as the longest rows, such as input_ids, attention_mask and labels"
                ) from None
            return batches.of_call(whole, *called.args)
        finally:
            hook.remove()
            put_back()
        return None

    def _clip_grad_norm(self, *_: Any, **__: Any) -> Tensor:
        """Clip to the norm of the arguments by the optimizer, which needs no look at each gradient."""
        return self._own_optimizer.clip_grad_norm_(self.args.max_grad_norm)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. A model that is to be trained is wrapped before, as it need not fit the device whole."""
        if self.train_dataset is not None:
            self.create_optimizer()
            # Where there is no model, the Trainer prepares one and logs how long that took.
            self.accelerator._models = self.accelerator._models or [self.model]
        elif self.optimizer is None:
            super()._move_model_to_device(self.model, self.args.device)
        return super().evaluation_loop(*args, **kwargs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what TRL's DPO compares with, which it does when the trainer is made.

        Without a reference model the model computes it before it is trained. It need not fit the device whole, so it is
        wrapped before.
        """
        if getattr(self, "ref_model", None) is None:
            self.create_optimizer()
        else:
            self._cast_reference()
        return super()._precompute_ref_logps(*args, **kwargs)


class ProTrainTrainer(ProTrainMixin, Trainer):
    """The Trainer of transformers on ProTrain."""


def on_protrain(trainer: type[Any], **arguments: Any) -> type[Any]:
    """The class ``trainer`` on ProTrain, or ``trainer`` itself if it already is, for frameworks that choose a Trainer.

    They have no place for the ``arguments`` of ``protrain.wrap``, so the class has them. Where a sampler of a framework
    packs rows, a batch is longer than its longest row, and ``example_batch=None`` has the plan made for the first one.
    """
    if issubclass(trainer, ProTrainMixin):
        return trainer
    members = {"__module__": trainer.__module__, "_wrap_defaults": arguments}
    return type(f"ProTrain{trainer.__name__}", (ProTrainMixin, trainer), members)


def _check(args: Any) -> None:
    """Raise a ValueError for training arguments that ProTrain cannot carry out."""
    precision = precision_of(args)
    refuse_precision(precision, "fp16=True" if args.fp16 else f"mixed precision {precision} of accelerate launch")
    if args.world_size != announced_processes():
        raise ValueError(
            f"the launcher announces {announced_processes()} processes, and the Trainer sees {args.world_size} of "
            "them, so that each would train on all data: pass use_cpu=True to train on CPUs"
        )
    if args.save_on_each_node:
        raise ValueError("save_on_each_node=True: ProTrain gathers states on rank 0 alone, so let that one save")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, between which the Trainer would copy the model: start one process "
            f"for each (torchrun --nproc-per-node {args.n_gpu}), or set CUDA_VISIBLE_DEVICES to one of them"
        )


def _refuse_losses_of_liger(trainer: Any) -> None:
    """ValueError if TRL computes the loss by a module of Liger, for which it reads weights outside of the model."""
    if any(type(each).__module__.startswith("liger_kernel.") for each in vars(trainer).values()):
        raise ValueError(
            "use_liger_kernel=True: before 1.14 TRL computes this loss outside of the model, of weights that ProTrain "
            "has elsewhere: use TRL 1.14 or newer, or leave the option out"
        )


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    """What a reward function of the user is replaced by where no reward is wanted."""
    return [0.0] * len(completions)


def _apart(records: Any) -> Any:
    """``records`` with containers of its own, so that what is added to one is not in the other."""
    if type(records) in (dict, defaultdict):
        copied = copy.copy(records)
        copied.update({name: _apart(value) for name, value in records.items()})
        return copied
    return copy.copy(records) if type(records) in (list, deque, set) else records
