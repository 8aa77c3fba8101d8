"""PyTorch's FSDP2, as its documentation and torchtitan use it, with the choices that are fastest here.

It comes with fp32 states, bf16 compute and exact clipping, like ProTrain. The contestant's name says how much is
offloaded, checkpointed, kept from forward to backward, and prefetched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.train.models import blocks_of, build_model, fill, parameter_groups, replace_loss, shape_blocks
from bench.train.ranks import start_group
from bench.train.task import WEIGHT_DECAY, Job
from bench.train.trainers import Trainer, adamw_options, backward, block_config, count, model_config


def fsdp2_trainer(job: Job, device: torch.device, example: Tensor) -> Trainer:
    """fully_shard of each block and of the rest, fp32 parameters, fused AdamW where they live.

    Parameters live in pinned host memory, but those that are resident. On a CPU there is nowhere to offload to: the
    same without the policy, to see that it runs.
    """
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    task, contestant = job.task, job.contestant
    on_gpu, several = device.type == "cuda", task.gpus > 1
    start_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")  # norms of offloaded gradients are reduced on the CPU
    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (task.gpus,))}
    if on_gpu:
        if not contestant.everything_resident:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
        # As torchtitan. Nothing is reduced in a world of one, so bf16 until the cast to fp32 loses no bit there.
        reduced = torch.float32 if several else None
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    model = build_model(task)
    replace_loss(model, task)
    parameters = count(model)
    blocks = blocks_of(model)
    shape_blocks(blocks, compile=contestant.compile, checkpointed=contestant.checkpoints(len(blocks)))
    for index, block in enumerate(blocks):  # made on the GPU: the model is never whole there unless it is to stay
        own = {**options, "reshard_after_forward": not contestant.gathered}
        if index < contestant.resident:
            own.pop("offload_policy", None)
            if not several:  # there is nothing to gather: a cast on the GPU
                own["reshard_after_forward"] = True
        fill(block, device=device, dtype=torch.float32)
        fully_shard(block, **own)
    fill(model, device=device, dtype=torch.float32)
    fully_shard(model, **options)
    if contestant.prefetched:
        _prefetch_neighbours(blocks, contestant.ahead)
    optimizers = [  # one for each kind of device: fused kernels are of one
        torch.optim.AdamW(groups, fused=True, **adamw_options(task))
        for groups in _by_device(parameter_groups(model, weight_decay=WEIGHT_DECAY))
    ]
    clip_ms: list[float] = []

    def step(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        # It returns when the gradients have reached the host.
        loss = backward(model, ids, task)
        norm: Any = None
        if contestant.clip:
            begin = time.perf_counter()
            norm = norm_by_torch(model) if contestant.everything_resident else norm_by_rows(model)
            nn.utils.clip_grads_with_norm_(model.parameters(), task.clip_norm, norm)
            clip_ms.append((time.perf_counter() - begin) * 1e3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss, norm

    norm = "torch.nn.utils.get_total_norm" if contestant.everything_resident else "by rows"
    return Trainer(
        step=step,
        parameters=parameters,
        config={
            **model_config(model, task),
            **block_config(contestant),
            "fully_shard": "every block, then the rest; parameters float32",
            "reshard_after_forward": not contestant.gathered,
            "prefetch": f"{contestant.ahead} blocks ahead" if contestant.prefetched else "torch's own",
            "gradients_of_batches_summed": "where they are updated",
            "blocks_not_offloaded": len(blocks) if contestant.everything_resident else contestant.resident,
            "norm": f"{norm}, then torch.nn.utils.clip_grads_with_norm_",
            "offload_policy": repr(options.get("offload_policy")),
            "mp_policy": repr(options.get("mp_policy")),
            "optimizer": "torch.optim.AdamW(fused=True)",
        },
        # On a GPU the clipping of resident gradients is only launched by then.
        said_afterwards=lambda: {"clip_ms": median(clip_ms)} if clip_ms and not contestant.everything_resident else {},
    )


def _prefetch_neighbours(blocks: Sequence[Any], ahead: int) -> None:
    """Gather the weights of the next blocks before one computes, ``ahead`` of them, in forward and in backward.

    By itself torch gathers them in forward when the next block is called, and in backward one block ahead.
    """
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + ahead]))
        block.set_modules_to_backward_prefetch(list(blocks[max(0, index - ahead) : index][::-1]))


def _by_device(groups: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """``groups``, those of parameters on one kind of device together."""
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    parted = [
        [{**group, "params": [one for one in group["params"] if one.device.type == kind]} for group in groups]
        for kind in sorted(kinds)
    ]
    return [[group for group in part if group["params"]] for part in parted]


def norm_by_torch(model: nn.Module) -> Tensor:
    """The norm of all gradients of all ranks, 0-d: torch's, as torchtitan has it."""
    norm: Any = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], foreach=True)
    whole: Tensor = norm.full_tensor()
    return whole


def norm_by_rows(model: nn.Module) -> Tensor:
    """The norm of all gradients of all ranks, 0-d on the CPU.

    torch.nn.utils.clip_grad_norm_ has the norm of a tensor on the host worked out by one thread, in one sum of floats:
    for 14336 x 4096 random numbers it is 0.45% short (torch 2.13). By rows all threads take part, and it is right to
    1 in 10 million.
    """
    found: list[Any] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    grads: list[Tensor] = [gradient.to_local() for gradient in found]
    norms = [torch.linalg.vector_norm(torch.linalg.vector_norm(g, dim=-1) if g.dim() > 1 else g) for g in grads]
    norm = torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms]))
    if dist.get_world_size() == 1:
        return norm
    squares = norm.square()
    dist.all_reduce(squares)
    return squares.sqrt()
