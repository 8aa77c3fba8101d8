"""ProTrain, the compute-only floor and resident weights, each as a function that does one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import protrain
from bench.train.contestants import Contestant
from bench.train.models import blocks_of, build_model, fill, parameter_groups, replace_loss, shape_blocks
from bench.train.results import Outcome
from bench.train.task import BETAS, EPSILON, WEIGHT_DECAY, Job, Task
from protrain.common.parameters import is_managed
from protrain.engine.report import Report
from protrain.planning import Plan

_OF_THE_HOST = "host_adam_gparams", "host_adam_threads"  # what plans expect of it

# Token ids [accumulation x batch, sequence] -> the mean of the losses, gradient norm.
Step = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A contestant that is ready."""

    step: Step
    parameters: int
    config: dict[str, Any]  # everything that was chosen for it
    plan: Plan | None = None
    pinned_bytes: Callable[[], int] = field(default=lambda: 0)  # beside what torch's own allocator pins
    device_bytes: Callable[[], int] = field(default=lambda: 0)  # beside what torch's own allocator has
    said_afterwards: Callable[[], dict[str, Any]] = field(default=dict)  # what the steps showed, beside their times


def weight_dtype(device: torch.device) -> torch.dtype:
    """Of the weights that compute: bfloat16, and on a CPU float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def adamw_options(task: Task) -> dict[str, Any]:
    """Hyperparameters of AdamW that all share; decay is in the groups."""
    return {"lr": task.learning_rate, "betas": BETAS, "eps": EPSILON}


def count(model: nn.Module) -> int:
    """Parameters, tied ones once. Before any of them is quantised: two 4-bit weights are one element."""
    return sum(parameter.numel() for parameter in model.parameters())


def whole_model(
    job: Job, device: torch.device, dtype: torch.dtype, *, checkpointed: Sequence[bool] | None = None
) -> tuple[Any, int]:
    """The task's model with all weights on ``device``, and the number of its parameters.

    Blocks are checkpointed as the contestant's name says, or as ``checkpointed`` says of each.
    """
    model = build_model(job.task)
    parameters = count(model)
    replace_loss(model, job.task)
    fill(model, device=device, dtype=dtype)
    model.to(device)
    blocks = blocks_of(model)
    wanted = job.contestant.checkpoints(len(blocks)) if checkpointed is None else checkpointed
    shape_blocks(blocks, compile=job.contestant.compile, checkpointed=wanted)
    return model, parameters


def protrain_trainer(job: Job, device: torch.device, example: Tensor) -> Trainer:
    """ProTrain as its documentation says: one call, nothing set but the memory there is."""
    task, contestant = job.task, job.contestant
    model = build_model(task)
    parameters = count(model)
    fill(model, device=device, dtype=weight_dtype(device), chosen=lambda parameter: not is_managed(parameter))
    groups = parameter_groups(model, weight_decay=WEIGHT_DECAY)
    chosen: dict[str, Any] = {
        "device_memory": task.device_memory,
        "host_memory": task.host_memory,
        "step_during_backward": not contestant.clip and task.accumulation == 1,
        "accumulation": task.accumulation,
        "moment_dtype": "bfloat16" if contestant.narrow else "float32",
        "compile": contestant.compile,
        "chunked_loss": task.chunked_loss,
    }
    wrapped, optimizer = protrain.wrap(
        model,
        torch.optim.AdamW(groups, **adamw_options(task)),
        example_batch={"input_ids": example, "labels": example},
        device=device,
        **chosen,
    )

    def step(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = backward(wrapped, ids, task)
        norm = optimizer.clip_grad_norm_(task.clip_norm) if contestant.clip else None
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return Trainer(
        step=step,
        parameters=parameters,
        config={
            **model_config(model, task),
            **chosen,
            "plan": str(optimizer.plan),
            "predicted_ms": optimizer.plan.step_ms,
            "hardware": optimizer.hardware.source,
            **{name: getattr(optimizer.hardware, name) for name in _OF_THE_HOST},
        },
        plan=optimizer.plan,
        pinned_bytes=lambda: optimizer.report().host_bytes,
        said_afterwards=lambda: _reached(optimizer.report()),
    )


def _reached(report: Report) -> dict[str, Any]:
    """Of a report what explains a step that takes longer than planned."""
    names = ("host_gparams", "predicted_host_gparams", "redone_updates")
    return {name: getattr(report, name) for name in names} | {"early_updates": report.speculative_updates}


def floor_trainer(job: Job, device: torch.device, example: Tensor) -> Trainer:
    """Forward and backward with all weights resident and every gradient dropped at once: no trainer can be faster.

    Blocks are checkpointed where the plan of the ProTrain row checkpoints them. A swapped block is one that is kept
    here: it computes the same.
    """
    assert job.planned_by is not None
    plan = Outcome.load(Path(job.planned_by)).plan
    assert plan is not None
    task = job.task
    checkpointed = [mode.recomputes for mode in plan.block_modes]
    model, parameters = whole_model(job, device, weight_dtype(device), checkpointed=checkpointed)
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def step(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return backward(model, ids, task), None

    return Trainer(
        step=step,
        parameters=parameters,
        config={
            **model_config(model, task),
            "weights": str(weight_dtype(device)),
            "compile": job.contestant.compile,
            "checkpointed_blocks": [index for index, wanted in enumerate(checkpointed) if wanted],
            "blocks": len(checkpointed),
            "optimizer": None,
        },
    )


def backward(model: nn.Module, ids: Tensor, task: Task) -> Tensor:
    """The forwards and backwards of a step. Returns the mean of their losses."""
    losses = []
    for batch in ids.split(task.batch):
        loss = model(input_ids=batch, labels=batch).loss / task.accumulation
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class MasterAdamW:
    """torch's fused AdamW on fp32 masters of the trained weights, where those are: what one does if everything fits.

    One optimizer for each part of the model, so that gradients are in fp32 for a part at a time.
    """

    def __init__(self, model: nn.Module, parts: list[nn.Module], task: Task) -> None:
        known: set[int] = set()
        self._parts: list[tuple[list[Tensor], list[Tensor], torch.optim.AdamW]] = []
        for part in (*parts, model):
            weights: list[Tensor] = [p for p in part.parameters() if p.requires_grad and id(p) not in known]
            known.update(id(p) for p in weights)
            if not weights:
                continue
            masters: list[Tensor] = [nn.Parameter(p.detach().float()) for p in weights]
            groups = [
                {"params": [m for m in masters if (m.dim() > 1) is matrix], "weight_decay": decay}
                for matrix, decay in ((True, WEIGHT_DECAY), (False, 0.0))
            ]
            optimizer = torch.optim.AdamW([g for g in groups if g["params"]], fused=True, **adamw_options(task))
            self._parts.append((weights, masters, optimizer))

    @torch.no_grad()
    def step(self) -> None:
        """Update, write the weights back, and drop all gradients."""
        for weights, masters, optimizer in self._parts:
            for weight, master in zip(weights, masters, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
                weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            torch._foreach_copy_(weights, masters)


def resident_trainer(job: Job, device: torch.device, example: Tensor) -> Trainer:
    """Everything on the device, no offloading at all."""
    task, contestant = job.task, job.contestant
    model, parameters = whole_model(job, device, weight_dtype(device))
    optimizer = MasterAdamW(model, blocks_of(model), task)

    def step(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = backward(model, ids, task)
        norm = nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm) if contestant.clip else None
        optimizer.step()
        return loss, norm

    return Trainer(
        step=step,
        parameters=parameters,
        config={
            **model_config(model, task),
            **block_config(contestant),
            "weights": str(weight_dtype(device)),
            "optimizer": "torch.optim.AdamW(fused=True) on fp32 masters, on the device",
        },
    )


def model_config(model: Any, task: Task) -> dict[str, Any]:
    """What a row says of the model itself."""
    return {
        "chunked_loss": task.chunked_loss,
        **({"quantised": task.quantised, "bitsandbytes": version("bitsandbytes")} if task.quantised else {}),
        **({"float8": "tensorwise, dynamic scales", "torchao": version("torchao")} if task.float8 else {}),
        "max_position_embeddings": getattr(model.config, "max_position_embeddings", None),
    }


def block_config(contestant: Contestant) -> dict[str, Any]:
    """What a row says of the blocks, where no plan decides."""
    which = f"the first {contestant.checkpointed}" if contestant.checkpointed else "all"
    return {"compile": contestant.compile, "checkpointed_blocks": which if contestant.checkpoint else "none"}
