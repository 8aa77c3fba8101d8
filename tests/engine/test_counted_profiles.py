"""Where a GPU cannot even run the model for its profile: a plan that just fits, or how much smaller a batch must be."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain import wrapping
from protrain.cli import plan_trace
from protrain.cli.main import main
from protrain.common.errors import PlanError
from protrain.forward.chunked_loss import is_chunked
from protrain.forward.compilation import CompiledForward
from protrain.profiler.trace import profile_together
from protrain.wrapping import change_forwards
from tests.engine.harness import Batch, Loop, adamw, assert_same, plain_run, states
from tests.engine.refusing import refused


def _runs_out(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapping, "cached_profile", _runs_out)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_a_batch_that_is_too_large_is_said_to_be(
    no_room: None, tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], compile: bool
) -> None:
    model, batch = tiny_model("llama"), tiny_batch(batch=8)
    words = "no plan fits the device memory: .* To fit: a batch of [1-7] instead of 8 fits"
    refused(model, adamw(model), batch, words, PlanError, device_memory="200KiB", compile=compile)
    torch._dynamo.reset()


def test_a_plan_that_just_fits_trains_as_ever(
    no_room: None,
    tiny_model: Callable[..., nn.Module],
    tiny_batch: Callable[..., Batch],
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches = [tiny_batch(seed=seed) for seed in range(3)]
    loop = Loop(max_norm=0.5)
    device = torch.device("cpu")
    values, expected = plain_run(lambda: tiny_model("llama"), batches, loop=loop, device=device, dtype=torch.float32)
    model = tiny_model("llama")
    limits: dict[str, Any] = {"device": device, "device_memory": "400KiB"}
    model, optimizer = protrain.wrap(model, adamw(model), example_batch=batches[0], chunked_loss=False, **limits)
    assert "memory is counted from shapes, and times are estimated" in capsys.readouterr().err
    assert optimizer.plan.n_persist < optimizer.plan.n_chunks
    assert loop.run(model, optimizer, batches) == values
    assert_same(states(model, optimizer), expected)


@pytest.mark.parametrize("option", ["compile", "chunked_loss"])
def test_what_is_changed_of_forwards_is_so_after_counting_too(
    no_room: None,
    tiny_model: Callable[..., nn.Module],
    tiny_batch: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
) -> None:
    found = []

    def build(model: nn.Module, *_: Any, **__: Any) -> None:
        block = model.get_submodule("model.layers.0")
        found.append((isinstance(block.forward, CompiledForward), is_chunked(model)))
        raise RuntimeError("far enough")

    monkeypatch.setattr(wrapping, "build_engine", build)
    model = tiny_model("llama")
    options = {"compile": False, "chunked_loss": False, option: True}
    refused(model, adamw(model), tiny_batch(), "far enough", RuntimeError, **options)
    assert found == [(option == "compile", option == "chunked_loss")]
    torch._dynamo.reset()


def test_forwards_are_as_before_when_changing_them_is_interrupted(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("protrain.wrapping.compile_blocks", interrupted)
    model = tiny_model("llama")
    with pytest.raises(KeyboardInterrupt):
        change_forwards(model, tiny_batch(), compile=True, chunked_loss=True)
    assert not is_chunked(model)
    assert "forward" not in vars(model)


def test_what_cannot_be_counted_either_raises_the_first_error(no_room: None) -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
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
    assert devices == ["cpu", "meta"]
    told = capsys.readouterr()
    assert "n_persist" in told.out
    assert "memory is counted from shapes" in told.err


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
    monkeypatch.setattr(wrapping, "cached_profile", profile_together)
    with pytest.raises(PlanError, match=r"no plan fits the GPU memory: .* To fit: a batch of \d+ instead of 200000"):
        protrain.wrap(model, optimizer, example_batch=batch, device_memory="2GiB", progress=False)
    smaller: Any = (batch[0][:2000],)
    model, trainer = protrain.wrap(model, optimizer, example_batch=smaller, device_memory="2GiB", progress=False)
    model(*smaller).float().square().mean().backward()
    trainer.step()
