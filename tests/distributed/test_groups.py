"""Groups of ranks: a part of all processes, two nodes, and what crosses between ranks and from the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import protrain
from tests.distributed.pool import on_ranks
from tests.distributed.test_bits import batches, of_family
from tests.distributed.training import Training, step
from tests.engine.harness import Spec, adamw, assert_same, states
from tests.tiny_models import tiny

OFFLOADED = Spec("none", "all", "n")


def train(rank: int, in_pairs: bool, of_pair: int) -> tuple[list[float], dict[str, Tensor]]:
    """Two ranks train a model. If they are ``in_pairs``, ranks 0 and 2 train one, and ranks 1 and 3 another one."""
    options: dict[str, Any] = {}
    if in_pairs:
        of_pair = rank % 2
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "model"))
        options["process_group"] = mesh["dp"].get_group()
    model, data = tiny("llama"), batches(8)[dist.get_rank(options.get("process_group")) :: 2]
    how: dict[str, Any] = {"device": "cpu", "device_memory": "1GiB", "progress": False, **options}
    wrapped, trainer = protrain.wrap(model, adamw(model, 1e-3 * (1 + of_pair)), example_batch=data[0], **how)
    losses = [step(wrapped, trainer, batch) for batch in data]
    return losses, states(wrapped, trainer)


@pytest.mark.slow
def test_a_group_of_some_processes_trains_a_model_of_its_own() -> None:
    found = on_ranks(4, train, True, 0)
    for pair in range(2):
        expected = on_ranks(2, train, False, pair)
        for (losses, final), (also, same) in zip(expected, found[pair::2], strict=True):
            assert losses == also
            assert_same(same, final)


def host_bytes(rank: int, local: int) -> int:
    """The host memory that a rank plans with, where ``local`` of four ranks share a node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(local))
        model = tiny("llama")
        how: dict[str, Any] = {"device": "cpu", "device_memory": "1GiB", "host_memory": "1GiB", "progress": False}
        _, trainer = protrain.wrap(model, adamw(model), example_batch=batches(1)[0], **how)
        return trainer.hardware.host_bytes


@pytest.mark.parametrize("local", [4, 2])
def test_the_ranks_of_a_node_share_its_host_memory(local: int) -> None:
    assert on_ranks(4, host_bytes, local) == [1024**3 // local] * 4


def traffic(rank: int, size: int, spec: Spec) -> tuple[int, int, int, int, int]:
    """Bytes of two steps after the first: uploaded, received and sent; and elements of weights and of gradients."""
    training = Training(rank, size, spec, **of_family("llama", micro_batches=size))
    reports = []
    for steps in (range(1), range(1, 3)):
        training.train(steps)
        training.optimizer.state_dict()  # it waits for all updates, and so for the uploads that follow them
        reports.append(training.optimizer.report())
    names = ("uploaded_bytes", "received_bytes", "sent_bytes")
    uploaded, received, sent = (getattr(reports[1], name) - getattr(reports[0], name) for name in names)
    elements = sum(parameter.numel() for parameter in training.model.parameters())
    return uploaded, received, sent, elements, training.optimizer.plan.n_chunks


@pytest.mark.slow
def test_what_crosses_the_links() -> None:
    alone, *_, count, _ = traffic(0, 1, OFFLOADED)
    assert alone == pytest.approx(2 * 4 * count, rel=0.02), "all weights of two steps in fp32, and their padding"
    for size in (2, 4):
        for uploaded, received, sent, elements, n_chunks in on_ranks(size, traffic, size, OFFLOADED):
            padding = n_chunks * 128 * size * 4 * 2
            assert abs(uploaded - alone / size) <= padding, "a rank uploads its own shard alone"
            whole = 2 * elements * 4 * (size - 1) / size  # of two steps in fp32, from or to the others
            assert abs(received - whole) <= padding, "with buffers for all chunks each is gathered once a step"
            assert abs(sent - whole) <= padding, "each gradient is sent once"
    for uploaded, *_ in on_ranks(2, traffic, 2, Spec("all", "all", "n")):
        assert uploaded == 0, "shards that are on the device are not uploaded"


def traced(rank: int, folder: Path) -> int:
    """Two traced steps. Returns the number of chunks."""
    training = Training(rank, 2, OFFLOADED, **of_family("gpt2", micro_batches=2))
    with protrain.trace(training.optimizer, folder / "trace.json", kernels=False):
        training.train(range(2))
    return training.optimizer.plan.n_chunks


def test_gathers_and_reductions_of_each_rank(tmp_path: Path) -> None:
    counts = on_ranks(2, traced, tmp_path)
    for name, n_chunks in zip(("trace.json", "trace-rank1.json"), counts, strict=True):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        pid = next(event["pid"] for event in events if event.get("args") == {"name": "ProTrain, measured"})
        measured = [event["name"] for event in events if event["pid"] == pid and event["ph"] == "X"]
        for chunk in range(n_chunks):
            assert measured.count(f"gather {chunk}") == 2, "with buffers for all chunks: once a step"
            assert f"reduce {chunk}" in measured
        titles = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == pid]
        assert titles[-2:] == ["gathers", "reductions"]
