"""DeepSpeed and torchao, each as its own documentation has it used, with the choices that are fastest here.

They come with fp32 masters and bf16 compute, like ProTrain. torchao's optimizer is for one GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from bench.train.models import parameter_groups
from bench.train.ranks import start_group
from bench.train.task import BETAS, EPSILON, WEIGHT_DECAY, Job
from bench.train.trainers import Trainer, adamw_options, block_config, model_config, whole_model


def torchao_trainer(job: Job, device: torch.device, example: Tensor) -> Trainer:
    """fp32 parameters on the GPU under autocast, their masters' states on the host; gradients leave inside backward.

    bf16 parameters would have bf16 states, which is another training.
    """
    task, contestant = job.task, job.contestant
    if task.accumulation > 1:
        raise ValueError("--accumulation: torchao's CPUOffloadOptimizer with offload_gradients=True sums no gradients")
    optimizer_class = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    model, parameters = whole_model(job, device, torch.float32)
    options = {**adamw_options(task), "fused": True}
    groups = parameter_groups(model, weight_decay=WEIGHT_DECAY)
    optimizer = optimizer_class(groups, torch.optim.AdamW, offload_gradients=True, **options)

    def step(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), None

    return Trainer(
        step=step,
        parameters=parameters,
        config={
            **model_config(model, task),
            **block_config(contestant),
            "torchao": version("torchao"),
            "parameters": "float32 on the device, autocast to bfloat16",
            "offload_gradients": True,
            "optimizer": "torch.optim.AdamW(fused=True)",
        },
    )


def deepspeed_trainer(job: Job, device: torch.device, example: Tensor) -> Trainer:
    """ZeRO with DeepSpeed's own CPU Adam on fp32 masters, bf16 weights, and sums of gradients in bf16."""
    task, contestant = job.task, job.contestant
    deepspeed = importlib.import_module("deepspeed")
    start_group("cpu:gloo,cuda:nccl")  # the loop compares times on the CPU
    zero: dict[str, Any] = {
        "stage": 2 if contestant.kind == "zero2" else 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if contestant.kind == "zero3params":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.batch,
        "gradient_accumulation_steps": task.accumulation,
        "gradient_clipping": task.clip_norm if contestant.clip else 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": task.learning_rate, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
        },
    }
    model, parameters = whole_model(job, device, torch.bfloat16)
    groups = parameter_groups(model, weight_decay=WEIGHT_DECAY)
    head = model.get_output_embeddings()
    gathers_for_loss = task.chunked_loss and zero["stage"] == 3
    with outputs_kept(head) if gathers_for_loss else nullcontext():
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    if gathers_for_loss:  # its gradient comes out of the loss, before any of the head's own hooks
        deepspeed.zero.register_external_parameter(model, head.weight)

    def step(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        losses = []
        for batch in ids.split(task.batch):
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)  # which divides it by their number
            engine.step()  # which updates after the last batch
            losses.append(loss.detach())
        norm = engine.get_global_grad_norm() if contestant.clip else None
        return torch.stack(losses).mean(), None if norm is None else torch.as_tensor(norm)

    return Trainer(
        step=step,
        parameters=parameters,
        config={
            **model_config(model, task),
            **block_config(contestant),
            "deepspeed": version("deepspeed"),
            **config,
        },
    )


@contextmanager
def outputs_kept(head: nn.Module) -> Iterator[None]:
    """What ``head`` returns is handed on as it is, whatever hooks that are registered in the body make of it.

    ZeRO-3's replace each output by another tensor, through which backward gathers the weight. The chunked loss has a
    placeholder there, with which nothing can be done before the loss, and backward does not pass through it.
    """
    outputs: list[Tensor] = []

    def put_aside(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        outputs.append(output)
        return torch.empty(0)

    head.register_forward_hook(put_aside)
    yield
    head.register_forward_hook(lambda module, inputs, output: outputs.pop())
