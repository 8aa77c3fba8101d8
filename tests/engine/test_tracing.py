"""protrain.trace and report(): every unit, copy and update beside the prediction, and nothing left behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.engine.report import Report
from tests.engine import residual
from tests.engine.harness import Loop, Spec, adamw, wrap_under

Batch = dict[str, Tensor]
LOOP, OFFLOADED = Loop(max_norm=1.0, scheduler=False), Spec("none", "least", "n")
_BOTH = ("ProTrain, measured", "ProTrain, predicted")


def read(path: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Spans by process and row."""
    events = json.loads(path.read_text())["traceEvents"]
    named = [event for event in events if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    processes = {pid: name for pid, name in processes.items() if name in _BOTH}
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in named if event["name"] == "thread_name"}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X" and event.get("pid") in processes:
            found.setdefault((processes[event["pid"]], rows[event["pid"], event["tid"]]), []).append(event)
    return found


def test_a_trace_has_every_unit_copy_and_update(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], tmp_path: Path, device: torch.device
) -> None:
    batches = [tiny_batch(seed=seed) for seed in range(5)]
    losses = []
    for traced in (False, True):
        model = tiny_model("llama")
        wrapped, optimizer = wrap_under(Spec("some", "least", "scn"), model, adamw(model), batches[0], device=device)
        values = LOOP.run(wrapped, optimizer, batches[:2])
        if traced:
            with protrain.trace(optimizer, tmp_path / "new" / "trace.json"):
                values += LOOP.run(wrapped, optimizer, batches[2:4])
        else:
            values += LOOP.run(wrapped, optimizer, batches[2:4])
        values += LOOP.run(wrapped, optimizer, batches[4:])
        losses.append(values)
    assert losses[0] == losses[1], "tracing changes nothing"
    plan = optimizer.plan
    rows = read(tmp_path / "new" / "trace.json")
    spans = Counter(event["name"] for event in rows["ProTrain, measured", "GPU"])
    kept, away = range(plan.n_persist), range(plan.n_persist, plan.n_chunks)
    assert {f"{phase} model.layers.{at}" for phase in ("forward", "backward") for at in range(3)} < spans.keys()
    assert {name for name in spans if name.startswith("update ")} == {f"update {chunk}" for chunk in kept}
    assert set(spans.values()) == {2}
    assert all(event["dur"] > 0 for event in rows["ProTrain, measured", "GPU"])
    updates = Counter(event["name"] for event in rows["ProTrain, measured", "host optimizer"])
    assert updates == Counter({f"update {chunk}": 2 for chunk in away})
    assert rows["ProTrain, predicted", "GPU"]
    assert rows["ProTrain, predicted", "host optimizer"]
    down = Counter(event["name"] for event in rows["ProTrain, measured", "device to host"])
    assert all(down[f"gradients {chunk}"] >= 2 for chunk in away)
    assert set(down) == {"activations", *(f"gradients {chunk}" for chunk in away)}
    up = {event["name"] for event in rows["ProTrain, measured", "host to device"]}
    assert {f"weights {chunk}" for chunk in away} <= up


def test_an_error_inside_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    def fail(model: nn.Module, optimizer: Any) -> None:
        with protrain.trace(optimizer, tmp_path / "trace.json"):
            model(*residual.batches(1)[0])
            raise ArithmeticError

    with residual.unharmed(OFFLOADED) as (model, optimizer), pytest.raises(ArithmeticError):
        fail(model, optimizer)


def test_what_cannot_be_traced_is_said_before_any_step(tmp_path: Path) -> None:
    wrapped, optimizer = residual.wrapped(OFFLOADED)
    asked: list[tuple[Any, Path, type[Exception], str]] = [
        (wrapped, tmp_path / "trace.json", ValueError, "needs the optimizer that protrain.wrap returned, not a Model"),
        (optimizer, tmp_path, IsADirectoryError, f"Is a directory: '{tmp_path}'"),
    ]
    for whose, path, kind, said in asked:
        with pytest.raises(kind, match=said), protrain.trace(whose, path):
            pytest.fail("a step may begin")
    with protrain.trace(optimizer, tmp_path / "trace.json", kernels=False):
        other = protrain.trace(optimizer, tmp_path / "other.json")
        with pytest.raises(protrain.MisuseError, match="leave that one first"), other:
            pytest.fail("a step may begin")
        LOOP.run(wrapped, optimizer, residual.batches(1))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


# -- the report --------------------------------------------------------------------------------------------------------

REPORT = Report(
    plan="n_persist=1/4",
    steps=1234,
    step_ms=2040.0,
    predicted_step_ms=2000.0,
    host_gparams=4.0,
    predicted_host_gparams=5.0,
    **dict.fromkeys(("device_bytes", "predicted_device_bytes", "host_bytes", "predicted_host_bytes"), 2**30),
    **dict.fromkeys(("fetches", "uploaded_bytes", "received_bytes", "sent_bytes"), 0),
    **{"speculative_updates": 30, "redone_updates": 2, "streamed_updates": 3},
)


def test_a_report_has_each_figure_beside_its_prediction_and_the_remedy_for_a_slow_host() -> None:
    assert "2.04 s in the median, predicted 2 s (measured +2.0%)" in str(REPORT)
    assert "2 TiB of weights received" in str(replace(REPORT, received_bytes=2 * 2**40, sent_bytes=2**40))
    slow = replace(REPORT, step_ms=2401.0)
    assert "while it is as busy as now" in slow.advice
    assert "look for what else takes time" in replace(slow, host_gparams=4.4).advice
    assert "most steps are clipped" in replace(slow, redone_updates=16).advice
    assert "may be faster" in replace(slow, step_ms=1599.0).advice
    for settled in (REPORT, replace(slow, step_ms=2399.0), replace(slow, step_ms=1601.0), replace(slow, steps=9)):
        assert settled.advice == ""
    assert "not measured before two steps" in str(replace(REPORT, steps=1, step_ms=0.0))
    idle = replace(REPORT, host_gparams=0.0, predicted_host_gparams=0.0, speculative_updates=0, streamed_updates=0)
    assert "updates" not in str(idle), "the host has none to make"
    assert Report.from_json(REPORT.to_json()) == REPORT
