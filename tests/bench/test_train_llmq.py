"""bench.train: what LLM.Q is told, and how its wheel for CUDA 12 finds its libraries beside a torch for CUDA 13."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.train.contestants import parse
from bench.train.llmq import build_forwarder, llmq_trainer, options_of
from bench.train.task import Job, Task

TASK = Task(model="tiny", layers=1, batch=2, sequence=4, accumulation=2, steps=3, warm_up=1, clip_norm=0.5)


class FakeTrainer:
    """What LLM.Q's trainer is asked for, in order."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.calls = arguments, list[Any]()

    def init_weights(self) -> None: ...

    def get_allocator_info(self, gpu: int) -> dict[str, dict[str, int]]:
        own = {"Weights": {"device": 3 * 2**20, "pinned": 5}, "Stack": {"device": 2**20, "pinned": 0}}
        return own | {"Free": {"device": 2**40}, "Other": {"device": 2**40}}

    def step(self, inputs: Any, targets: Any) -> None:
        self.calls.append((inputs.dtype.name, inputs.tolist(), targets.tolist()))

    def update(self, *arguments: float) -> dict[str, float]:
        self.calls.append(arguments)
        return {"loss": 5.5, "norm": 2.0}


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[FakeTrainer]:
    """The trainers that a contestant has made, of a stand-in for LLM.Q's package."""
    pytest.importorskip("transformers")
    made: list[FakeTrainer] = []

    def make(**arguments: Any) -> FakeTrainer:
        made.append(FakeTrainer(**arguments))
        return made[-1]

    package = SimpleNamespace(LLMQTrainer=make, LLamaConfig=SimpleNamespace, LLamaOptions=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "pyllmq", package)
    monkeypatch.setattr("bench.train.llmq.version", lambda name: "0.3.1")
    monkeypatch.setattr("bench.train.llmq.load_libraries", lambda: None)
    return made


def _job(name: str, **changes: Any) -> Job:
    return Job(task=replace(TASK, **changes), contestant=parse(name), tokens="", planned_by=None, until=0.0)


@pytest.mark.parametrize(("name", "limit", "norm"), [("llmq", 0.5, 2.0), ("llmq-unclipped", float("inf"), None)])
def test_a_step_of_llmq_has_the_task_s_batches_and_hyperparameters(
    name: str, limit: float, norm: float | None, trainers: list[FakeTrainer]
) -> None:
    trainer = llmq_trainer(_job(name), torch.device("cpu"), torch.zeros(1, 4))
    ids = torch.arange(16).view(4, 4)
    for step in range(2):
        loss, found = trainer.step(ids)
        assert (loss.item(), None if found is None else found.item()) == (5.5, norm)
        first, second, update = trainers[0].calls[-3:]
        assert first == ("int32", [[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3, -100], [5, 6, 7, -100]])
        assert second[1] == [[8, 9, 10, 11], [12, 13, 14, 15]]
        assert update == (TASK.learning_rate, 0.9, 0.95, step, 0.1, limit)
    assert (trainer.device_bytes(), trainer.pinned_bytes()) == (4 * 2**20, 5)
    config = trainers[0].arguments["config"]
    assert (config.use_qkv_bias, config.rope_theta, config.vocab_size) == (False, 1e4, 256)  # tiny is a Llama


def test_llmq_is_held_to_the_memory_of_the_task(trainers: list[FakeTrainer]) -> None:
    llmq_trainer(_job("llmq", device_memory="4MiB"), torch.device("cpu"), torch.zeros(1, 4))
    with pytest.raises(MemoryError, match=r"LLM\.Q takes 4.* MiB of the GPU, where there are to be 3MiB"):
        llmq_trainer(_job("llmq", device_memory="3MiB"), torch.device("cpu"), torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llmq-kept", {"momentum_type": "fp32", "variance_type": "fp32"}),
        ("llmq-narrow-normsrecomputed", {"momentum_type": "bf16", "variance_type": "bf16", "recompute_rms_norm": True}),
        ("llmq", {"recompute_swiglu": True, "recompute_att": True, "recompute_block": True}),
        ("llmq-kept-offloadedvariances", {"offload_opt_v": True}),
        (
            "llmq-kept-offloadedmoments-zerocopied",
            {"offload_opt_m": True, "offload_opt_v": True, "use_zero_copy": True},
        ),
        ("llmq-kept-offloadedmasters", {"offload_master": True, "shard_weights": True}),
    ],
)
def test_names_are_options_of_llmq(name: str, options: dict[str, object]) -> None:
    chosen = options_of(parse(name), tokens=8 * 1024)
    assert {key: value for key, value in chosen.items() if key in options} == options
    assert chosen["use_cuda_graphs"]
    if "kept" in name:
        wanted = {key for key, value in options.items() if value is True}
        assert {key for key, value in chosen.items() if value is True} == wanted | {"use_cuda_graphs"}


def test_llmq_s_logits_are_computed_of_equal_parts_of_a_batch() -> None:
    parts = {tokens: options_of(parse("llmq"), tokens=tokens)["lmhead_chunks"] for tokens in (512, 4096, 8192, 12000)}
    assert parts == {512: 1, 4096: 1, 8192: 2, 12000: 3}


def test_a_model_that_llmq_cannot_train_is_an_error_of_its_row() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"LLM\.Q trains models like Qwen2 and Llama .*, not gpt2"):
        llmq_trainer(_job("llmq", model="gpt2"), torch.device("cpu"), torch.zeros(1, 4))


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="needs gcc for x86-64")
def test_calls_of_cublas_12_reach_version_13_with_all_their_arguments(tmp_path: Path) -> None:
    names = ", ".join(f"long {name}" for name in "abcdefghij")
    (tmp_path / "newer.c").write_text(f"long cublasLtMatmul({names}) {{ return a + 10 * b + 100 * i + 1000 * j; }}")
    newer = tmp_path / "libnewer.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(newer), str(tmp_path / "newer.c")], check=True)
    forwarder = ctypes.CDLL(str(build_forwarder(tmp_path, str(newer))))
    forwarder.cublasLtMatmul.restype = ctypes.c_long
    assert forwarder.cublasLtMatmul(*map(ctypes.c_long, (1, 2, 0, 0, 0, 0, 0, 0, 3, 4))) == 4321
