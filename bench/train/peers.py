"""The systems compared with, each as its own documentation has it used, with the choices that are fastest here.

They come with fp32 masters, bf16 compute and exact clipping, like ProTrain. A world of one process throughout.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.train.models import blocks_of, build_model, fill, parameter_groups, replace_loss, shape_blocks
from bench.train.task import BETAS, EPSILON, WEIGHT_DECAY, Job
from bench.train.trainers import Trainer, adamw_options, block_config, count, model_config

_HOST = "127.0.0.1"


def fsdp2_trainer(job: Job, device: torch.device, example: Tensor) -> Trainer:
    """fully_shard of each block and of the rest, fp32 parameters in pinned host memory, fused AdamW on the CPU.

    On a CPU there is nowhere to offload to: the same without the policy, to see that it runs.
    """
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    task, contestant = job.task, job.contestant
    on_gpu = device.type == "cuda"
    _start_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    )  # norms of offloaded gradients are reduced on the CPU
    mesh = init_device_mesh(device.type, (1,))
    options: dict[str, Any] = {"mesh": mesh}
    if on_gpu:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
        # Nothing is reduced in a world of one, so bf16 until the cast to the parameters' fp32 loses no bit.
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = build_model(task)
    replace_loss(model, task, device)
    parameters = count(model)
    blocks = blocks_of(model)
    if contestant.resident > len(blocks):
        raise ValueError(f"{contestant.name}: the model has {len(blocks)} blocks")
    shape_blocks(blocks, compile=contestant.compile, checkpointed=[contestant.checkpoint] * len(blocks))
    for index, block in enumerate(blocks):  # made on the GPU: the model is never whole there unless it is to stay
        own = {**options, "reshard_after_forward": not contestant.gathered}
        if index < contestant.resident:  # nothing to gather: a cast on the GPU
            own["reshard_after_forward"] = True
            own.pop("offload_policy", None)
        fill(block, device=device, dtype=torch.float32)
        fully_shard(block, **own)
    fill(model, device=device, dtype=torch.float32)
    fully_shard(model, **options)
    optimizers = [  # one for each kind of device: fused kernels are of one
        torch.optim.AdamW(groups, fused=True, **adamw_options(task))
        for groups in _by_device(parameter_groups(model, weight_decay=WEIGHT_DECAY))
    ]

    clip_ms: list[float] = []

    def step(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()  # which returns when the gradients have reached the host
        norm: Any = None
        if contestant.clip:
            begin = time.perf_counter()
            norm = _norm_by_rows(model)
            nn.utils.clip_grads_with_norm_(model.parameters(), task.clip_norm, norm)
            clip_ms.append((time.perf_counter() - begin) * 1e3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach(), norm

    return Trainer(
        step=step,
        parameters=parameters,
        config={
            **model_config(model, task),
            **block_config(contestant),
            "fully_shard": "every block, then the rest; parameters float32",
            "reshard_after_forward": not contestant.gathered,
            "blocks_not_offloaded": contestant.resident,
            "norm": "by rows, then torch.nn.utils.clip_grads_with_norm_",
            "offload_policy": repr(options.get("offload_policy")),
            "mp_policy": repr(options.get("mp_policy")),
            "optimizer": "torch.optim.AdamW(fused=True)",
        },
        said_afterwards=lambda: {"clip_ms": median(clip_ms)} if clip_ms else {},
    )


def _by_device(groups: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """``groups``, those of parameters on one kind of device together."""
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    parted = [
        [{**group, "params": [one for one in group["params"] if one.device.type == kind]} for group in groups]
        for kind in sorted(kinds)
    ]
    return [[group for group in part if group["params"]] for part in parted]


def _norm_by_rows(model: nn.Module) -> Tensor:
    """The norm of all gradients of a world of one, 0-d on the CPU.

    torch.nn.utils.clip_grad_norm_ has the norm of a tensor on the host worked out by one thread, in one sum of floats:
    for 14336 x 4096 random numbers it is 0.45% short (torch 2.13). By rows all threads take part, and it is right to
    1 in 10 million.
    """
    found: list[Any] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    grads: list[Tensor] = [gradient.to_local() for gradient in found]
    norms = [torch.linalg.vector_norm(torch.linalg.vector_norm(g, dim=-1) if g.dim() > 1 else g) for g in grads]
    return torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms]))


def torchao_trainer(job: Job, device: torch.device, example: Tensor) -> Trainer:
    """fp32 parameters on the GPU under autocast, their masters' states on the host; gradients leave inside backward.

    bf16 parameters would have bf16 states, which is another training.
    """
    task, contestant = job.task, job.contestant
    optimizer_class = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    model = build_model(task)
    replace_loss(model, task, device)
    fill(model, device=device, dtype=torch.float32)
    model.to(device)
    blocks = blocks_of(model)
    shape_blocks(blocks, compile=contestant.compile, checkpointed=[contestant.checkpoint] * len(blocks))
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
        parameters=count(model),
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
    """ZeRO with DeepSpeed's own CPU Adam on fp32 masters, bf16 weights."""
    task, contestant = job.task, job.contestant
    deepspeed = importlib.import_module("deepspeed")
    _start_process_group("nccl")
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
        "gradient_accumulation_steps": 1,
        "gradient_clipping": task.clip_norm if contestant.clip else 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": task.learning_rate, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
        },
    }
    model = build_model(task)
    replace_loss(model, task, device)
    parameters = count(model)
    fill(model, device=device, dtype=torch.bfloat16)
    model.to(device)
    blocks = blocks_of(model)
    shape_blocks(blocks, compile=contestant.compile, checkpointed=[contestant.checkpoint] * len(blocks))
    groups = parameter_groups(model, weight_decay=WEIGHT_DECAY)
    head = model.get_output_embeddings()
    gathers_for_loss = task.chunked_loss and zero["stage"] == 3
    with outputs_kept(head) if gathers_for_loss else nullcontext():
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    if gathers_for_loss:  # its gradient comes out of the loss, before any of the head's own hooks
        deepspeed.zero.register_external_parameter(model, head.weight)

    def step(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm() if contestant.clip else None
        return loss.detach(), None if norm is None else torch.as_tensor(norm)

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

    ZeRO-3's replace each output by another tensor, through which backward gathers the weight. The chunked loss knows
    its placeholder by identity, and backward does not pass through that.
    """
    outputs: list[Tensor] = []
    head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    yield
    head.register_forward_hook(lambda module, inputs, output: outputs.pop())


def _start_process_group(backend: str) -> None:
    """A world of this process alone, without a network."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that resolves to nothing would stop gloo
    store = torch.distributed.TCPStore(_HOST, 0, world_size=1, is_master=True)
    # What torchrun would set: DeepSpeed looks for it.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR=_HOST, MASTER_PORT=str(store.port))
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
