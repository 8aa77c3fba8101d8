"""Memory without a plan, and plans that do not suit: refused before any memory is taken, with a remedy that works."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain import wrapping
from protrain.cli import plan_trace
from protrain.cli.main import main
from protrain.common.errors import PlanError
from protrain.common.tables import parse_memory
from protrain.engine.states.arena import Arena
from protrain.planning import Plan
from protrain.profiler.trace import profile
from tests.engine import residual
from tests.engine.harness import Batch, Loop, Spec, adamw, assert_same, plain_run, states, wrap_under
from tests.engine.refusing import refused


@pytest.fixture
def model(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    return tiny_model("llama")


@pytest.fixture
def no_memory_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: Any, **__: Any) -> None:
        raise AssertionError("memory was taken before the plan was known to fit")

    monkeypatch.setattr(Arena, "reserve", take)
    monkeypatch.setattr(wrapping, "build_engine", take)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["device_memory", "host_memory"])
def test_the_remedy_of_a_plan_error_works(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], which: str
) -> None:
    model, batch = tiny_model("gpt2"), tiny_batch(batch=4)
    memory: dict[str, Any] = {"device_memory": "600KiB", "host_memory": "2GiB"} | {which: "40KiB"}
    words = f"no plan fits the {which.replace('_', ' ')}.*{which} of at least"
    error = refused(model, adamw(model), batch, words, PlanError, **memory)
    assert isinstance(error, PlanError)
    assert error.needed_bytes > error.available_bytes == 40 << 10
    found = re.search(rf"{which} of at least ([\d.]+\w+)", str(error))
    assert found is not None
    memory[which] = found.group(1)
    protrain.wrap(model, adamw(model), example_batch=batch, device="cpu", progress=False, **memory)
    assert parse_memory(found.group(1), name="needed") < 1.01 * error.needed_bytes


def test_the_smaller_batch_of_a_plan_error_fits() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    batch = (torch.randn(512, 32),)
    words = r"a batch of \d+ instead of 512 fits"
    error = refused(model, adamw(model), batch, words, PlanError, device_memory="150KiB", host_memory="1GiB")
    found = re.search(r"a batch of (\d+) instead", str(error))
    assert found is not None
    smaller = int(found.group(1))
    assert smaller > 64, "it is the smallest change that is asked for"
    smaller_batch = (batch[0][:smaller].clone(),)
    options: Any = {"device": "cpu", "device_memory": "150KiB", "host_memory": "1GiB", "progress": False}
    protrain.wrap(model, adamw(model), example_batch=smaller_batch, **options)


# -- plans that were given ---------------------------------------------------------------------------------------------


@pytest.fixture
def plan(tiny_model: Callable[..., nn.Module], batch: Batch) -> Plan:
    model = tiny_model("llama")
    spec = Spec("some", "all", "c")
    return wrap_under(spec, model, adamw(model), batch)[1].plan


def test_plans_that_do_not_suit(
    plan: Plan, no_memory_taken: None, tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch]
) -> None:
    def attempt(words: str, kind: type[Exception], wrong: Plan | str, **options: Any) -> None:
        model = tiny_model(options.pop("family", "llama"))
        refused(model, adamw(model), options.pop("batch", tiny_batch()), words, kind, plan=wrong, **options)

    attempt("cannot read a plan from nowhere.json: No such file", ValueError, "nowhere.json")
    attempt("made for another model .*make a new plan, or leave plan= out", ValueError, plan, family="gpt2")
    attempt("made for another model .*dtype differ", ValueError, plan, dtype="bfloat16")
    elsewhere = dataclasses.replace(plan, model=f"{plan.model.partition('-')[0]}-0")
    attempt("made for another model .*the same parameters, but other modules use them", ValueError, elsewhere)
    attempt(
        "the plan does not fit the device .*leave the plan out", PlanError, plan, device_memory=plan.device_bytes - 1
    )
    attempt("the plan does not fit the host memory", PlanError, plan, host_memory=plan.host_bytes - 1)
    attempt("the plan does not fit the", PlanError, plan, device_memory=plan.device_bytes, batch=tiny_batch(batch=8))
    attempt("n_buffer must be", ValueError, dataclasses.replace(plan, n_buffer=99))
    attempt("the plan's block_modes name", ValueError, dataclasses.replace(plan, n_ckpt=0))


def test_a_plan_for_single_batches_is_carried_out_for_several_where_it_fits(
    plan: Plan, tiny_model: Callable[..., nn.Module], batch: Batch
) -> None:
    def wrap(more_bytes: int) -> Plan:
        model, host_memory = tiny_model("llama"), plan.host_bytes + more_bytes
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "accumulation": 4, "progress": False}
        options |= {"host_memory": host_memory, "device_memory": plan.device_bytes + more_bytes}
        return protrain.wrap(model, adamw(model), example_batch=batch, plan=plan, **options)[1].plan

    with pytest.raises(PlanError, match=r"made for accumulation=1, and here it is 4: make a new plan\. To fit:"):
        wrap(0)
    sums_bytes = 4 * plan.n_chunks * plan.chunk_elements  # or less
    assert wrap(sums_bytes).accumulation == 4
    assert wrap(sums_bytes).host_bytes <= plan.host_bytes + sums_bytes


# -- where a GPU cannot even run the model for its profile -------------------------------------------------------------


def _runs_out(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapping, "cached_profile", _runs_out)


def test_a_batch_that_is_too_large_is_said_to_be(
    no_room: None, tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch]
) -> None:
    model, batch = tiny_model("llama"), tiny_batch(batch=8)
    words = "no plan fits the device memory: .* To fit: a batch of [1-7] instead of 8 fits"
    refused(model, adamw(model), batch, words, PlanError, device_memory="200KiB", compile=True)
    torch._dynamo.reset()


def test_a_plan_that_just_fits_trains_as_ever(
    no_room: None,
    tiny_model: Callable[..., nn.Module],
    tiny_batch: Callable[..., Batch],
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches, loop = [tiny_batch(seed=seed) for seed in range(3)], Loop(max_norm=0.5)
    values, expected = plain_run(lambda: tiny_model("llama"), batches, run=loop.run)
    model = tiny_model("llama")
    limits: dict[str, Any] = {"device": "cpu", "device_memory": "400KiB"}
    model, optimizer = protrain.wrap(model, adamw(model), example_batch=batches[0], chunked_loss=False, **limits)
    assert "memory is counted from shapes, and times are estimated" in capsys.readouterr().err
    assert optimizer.plan.n_persist < optimizer.plan.n_chunks
    assert loop.run(model, optimizer, batches) == values
    assert_same(states(model, optimizer), expected)


@pytest.fixture
def small_gpu() -> Iterator[torch.device]:
    """An allocator that refuses more than 2 GiB."""
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / total, device)
    try:
        yield device
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
def test_on_a_small_gpu(small_gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(4)))
    batch = (torch.randn(200_000, 4096),)  # 1.5 GiB in bfloat16, and as much at every step of the way
    optimizer = torch.optim.AdamW(model.parameters())
    monkeypatch.setattr(wrapping, "cached_profile", profile)
    with pytest.raises(PlanError, match=r"no plan fits the GPU memory: .* To fit: a batch of \d+ instead of 200000"):
        protrain.wrap(model, optimizer, example_batch=batch, device_memory="2GiB", progress=False)
    smaller: Any = (batch[0][:2000],)
    model, trainer = protrain.wrap(model, optimizer, example_batch=smaller, device_memory="2GiB", progress=False)
    model(*smaller).float().square().mean().backward()
    trainer.step()


# -- limits of the environment -----------------------------------------------------------------------------------------


def test_the_device_is_limited_unless_the_call_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(**limits: Any) -> Plan:
        model, batch = residual.make(256), residual.batches(1)[0]
        options: dict[str, Any] = {"example_batch": batch, "device": "cpu", "progress": False, **limits}
        return protrain.wrap(model, adamw(model), **options)[1].plan

    monkeypatch.setenv("PROTRAIN_DEVICE_MEMORY", "3MiB")
    limited = plan()
    assert limited.device_bytes <= 3 << 20
    assert limited == plan(device_memory="3MiB")
    assert plan(device_memory="64MiB").n_persist > limited.n_persist


def test_what_cannot_be_counted_either_raises_the_first_error(no_room: None) -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) * len(x[x.abs() < 1e9])
            return x

    model = Choosing()
    refused(model, adamw(model), (torch.randn(2, 8),), "Tried to allocate 20.00 GiB", torch.OutOfMemoryError)


def test_plans_of_the_command_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    profile = protrain.profile
    devices = []

    def runs_out(*_: Any, **options: Any) -> Any:
        devices.append(str(options["device"]))
        return _runs_out()

    def counted(*args: Any, **options: Any) -> Any:
        devices.append(str(options["device"]))
        return profile(*args, **options)

    monkeypatch.setattr(plan_trace, "cached_profile", runs_out)
    monkeypatch.setattr(plan_trace, "profile", counted)
    assert main(["plan", "tiny", "--device", "cpu", "--batch", "2", "--seq", "32"]) == 0
    assert devices[:2] == ["cpu", "meta"]
    told = capsys.readouterr()
    assert "n_persist" in told.out
    assert "memory is counted from shapes" in told.err
