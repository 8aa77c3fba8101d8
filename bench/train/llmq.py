"""LLM.Q, a trainer in C++ and CUDA (github.com/IST-DASLab/llmq), as its own script uses it, with what is fastest here.

It differs from the other contestants: its masters are the bf16 weights themselves, which an update rounds
stochastically, and it adds up the gradients of a step in bf16. Its start values are its own. It ignores the last
position of each row, as transformers does, but divides the loss by all positions. Its clipping, of version 0.3,
multiplies by limit / norm² where norm² is above the limit. The contestant's name says what is recomputed and offloaded.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.train.contestants import Contestant
from bench.train.models import build_model
from bench.train.task import BETAS, EPSILON, WEIGHT_DECAY, Job
from bench.train.trainers import Trainer, count
from protrain.common.tables import format_bytes, parse_memory

_NO_TARGET = -100  # what its loss, like torch's, ignores
_TOKENS_OF_LOGITS = 4096  # whose logits are whole at a time: 1.2 GiB with a vocabulary of 152,064


def llmq_trainer(job: Job, device: torch.device, example: Tensor) -> Trainer:
    """LLM.Q's trainer of the task's GPUs. ValueError for models that it lacks, MemoryError beyond the task's memory."""
    task, contestant = job.task, job.contestant
    model = build_model(task)
    config = model.config
    rotary = config.rope_parameters if config.model_type in ("qwen2", "llama") else {}
    if rotary.get("rope_type") != "default":
        raise ValueError(
            f"LLM.Q trains models like Qwen2 and Llama with plain rotary positions, not {config.model_type}"
        )
    load_libraries()
    pyllmq = importlib.import_module("pyllmq")
    chosen = options_of(contestant, tokens=task.batch * task.sequence)
    options = pyllmq.LLamaOptions()
    for name, value in chosen.items():
        setattr(options, name, value)
    trainer = pyllmq.LLMQTrainer(
        ngpu=task.gpus,
        config=pyllmq.LLamaConfig(
            architecture="qwen2",
            use_qkv_bias=config.model_type == "qwen2",  # without it, it is Llama
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            rope_theta=rotary["rope_theta"],
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            dtype="bfloat16",
        ),
        options=options,
        batch_size=task.batch,
        seq_len=task.sequence,
        grad_accum=task.accumulation,
        memcpy_all_gather=True,  # with several GPUs, as its own script does
        memcpy_send_recv=True,
    )
    trainer.init_weights()
    taken = _allocated(trainer, "device")
    if task.device_memory is not None and taken > parse_memory(task.device_memory, name="device_memory"):
        raise MemoryError(f"LLM.Q takes {format_bytes(taken)} of the GPU, where there are to be {task.device_memory}")
    limit = task.clip_norm if contestant.clip else math.inf
    steps = itertools.count()  # LLM.Q adds 1 for its corrections of the moments

    def step(ids: Tensor) -> tuple[Tensor, Tensor | None]:
        for batch in ids.to("cpu", torch.int32).split(task.gpus * task.batch):
            targets = nn.functional.pad(batch[:, 1:], (0, 1), value=_NO_TARGET)
            trainer.step(batch.numpy(), targets.numpy())
        done = trainer.update(task.learning_rate, *BETAS, next(steps), WEIGHT_DECAY, limit)
        return torch.tensor(done["loss"]), torch.tensor(done["norm"]) if contestant.clip else None

    return Trainer(
        step=step,
        parameters=count(model),
        config={
            "pyllmq": version("pyllmq"),
            "options": chosen,
            "masters": "bfloat16, rounded stochastically",
            "gradients": "added up in bfloat16",
            "start_values": "LLM.Q's own, so that losses are not those of the other rows",
            "epsilon": EPSILON,  # LLM.Q has no other
        },
        pinned_bytes=lambda: _allocated(trainer, "pinned"),
        device_bytes=lambda: _allocated(trainer, "device"),
    )


def options_of(contestant: Contestant, *, tokens: int) -> dict[str, Any]:
    """LLM.Q's options for ``contestant``, with so many ``tokens`` in a batch.

    Masters in bf16 are the weights that compute.
    """
    moments = "offloadedmoments" in contestant.own
    norms, whole = "normsrecomputed" in contestant.own, contestant.checkpoint
    blocks = whole and not norms
    moment_type = "bf16" if contestant.narrow else "fp32"
    return {
        **dict.fromkeys(("recompute_swiglu", "recompute_rms_norm"), whole),
        **dict.fromkeys(("recompute_ffn", "recompute_qkv", "recompute_att", "recompute_block"), blocks),
        "offload_opt_m": moments,
        "offload_opt_v": moments or "offloadedvariances" in contestant.own,
        "use_cuda_graphs": True,
        "use_all_to_all_reduce": True,
        "momentum_type": moment_type,
        "variance_type": moment_type,
        "lmhead_chunks": next(n for n in range(1, tokens + 1) if tokens % n == 0 and tokens // n <= _TOKENS_OF_LOGITS),
    }


def _allocated(trainer: Any, where: str) -> int:
    """Bytes that LLM.Q has allocated on the "device" or as "pinned" host memory, all before the first step.

    Its list has two entries that are not its own: what is free, and what CUDA's context and libraries take.
    """
    segments = trainer.get_allocator_info(0)
    return sum(segments[name].get(where, 0) for name in segments if name not in ("Free", "Other"))


def load_libraries() -> None:
    """Load what LLM.Q's wheel, which is built for CUDA 12, links and the loader may not find by itself.

    The loader takes a library that the process has already, so cuDNN and NCCL are torch's. OSError if one is nowhere.
    """
    for name in ("libcudart.so.12", "libcublasLt.so.12"):
        packages = [path for entry in sys.path for path in Path(entry).glob(f"nvidia/*/lib/{name}")]
        ctypes.CDLL(str(packages[0]) if packages else name, ctypes.RTLD_GLOBAL)
