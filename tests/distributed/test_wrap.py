"""What wrap says on two ranks: one error for all, warnings of rank 0 alone, and groups that it does not take."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import protrain
from protrain import wrapping
from protrain.common.tables import format_bytes
from protrain.profiler import cache, step_times, trace
from tests.distributed.pool import errors_on, on_ranks
from tests.distributed.training import set_dropout, step
from tests.engine import residual
from tests.engine.harness import adamw, assert_same, seeded
from tests.tiny_models import tiny, tiny_config

transformers = pytest.importorskip("transformers")


def make(*, dropout: float = 0.0) -> nn.Module:
    return set_dropout(residual.make(width=256, depth=3), dropout)


def batch(seed: int) -> Any:
    return residual.batches(seed + 1)[seed]


def wrap(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    usual = {"example_batch": batch(0), "device": "cpu", "device_memory": "64MiB"}
    return protrain.wrap(model, adamw(model), progress=False, **(usual | options))


def warned(rank: int, seeds: Sequence[tuple[int, int]], dropout: float, example: bool) -> list[str]:
    """The warnings of wrap and two steps. Each rank has a seed for its batch, and one for dropout."""
    with warnings.catch_warnings(record=True, action="always") as caught, seeded():
        data, choices = seeds[rank]
        model, optimizer = wrap(make(dropout=dropout), **({} if example else {"example_batch": None}))
        torch.manual_seed(choices)
        with torch.no_grad():
            model.eval()
            if example:
                model(*batch(7))  # evaluation on the same batches is usual
            model.train()
        for _ in range(2):
            step(model, optimizer, batch(data))
    return [str(each.message) for each in caught]


SAME_BATCH = "ranks 0 and 1 train on the same first batch"
SAME_DROPOUT = "ranks 0 and 1 begin with the same random numbers, so dropout"


@pytest.mark.parametrize(
    ("seeds", "dropout", "example", "said"),
    [
        (((1, 3), (1, 3)), 0.5, True, [SAME_BATCH, SAME_DROPOUT]),
        (((1, 3), (1, 4)), 0.5, False, [SAME_BATCH]),
        (((1, 3), (2, 3)), 0.5, True, [SAME_DROPOUT]),
        (((1, 3), (2, 3)), 0.0, True, []),
    ],
)
def test_ranks_that_do_the_same(
    seeds: Sequence[tuple[int, int]], dropout: float, example: bool, said: list[str]
) -> None:
    first, other = on_ranks(2, warned, seeds, dropout, example)
    assert [text[: len(start)] for text, start in zip(first, said, strict=True)] == said
    assert not other


def copies(rank: int, host_memory: str, empty: bool = False) -> list[str]:
    """The warnings of wrap for a model that each rank has built."""
    with protrain.empty_parameters() if empty else nullcontext():
        model = make()
    with warnings.catch_warnings(record=True, action="always") as caught:
        wrap(model, host_memory=host_memory)
    return [str(each.message) for each in caught]


def test_whole_models_in_every_process() -> None:
    own = sum(parameter.nbytes for parameter in make().parameters())
    said = (
        "each of the 2 processes on this machine holds the whole model in host memory, "
        f"{format_bytes(2 * own)} (2 x {format_bytes(own)}) in all"
    )
    first, other = on_ranks(2, copies, f"{15 * own}B")
    assert [text[: len(said)] for text in first] == [said]
    assert "protrain.empty_parameters()" in first[0]
    assert not other
    for error in errors_on(2, copies, f"{2 * own - 1}B"):
        assert error.startswith(f"ValueError: {said}, more than host_memory=")
    assert on_ranks(2, copies, f"{30 * own}B") == [[], []], "little memory is not worth a word"
    assert on_ranks(2, copies, f"{15 * own}B", True) == [[], []]


def little_memory(rank: int, free: int | None) -> tuple[int, list[str]]:
    """Wrap a model without weights where so much host memory is free. Returns what the plan takes, and the warnings."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True, action="always") as caught:
        if free is not None:
            patch.setattr(wrapping, "available_host_bytes", lambda: free)
        with protrain.empty_parameters():
            model = make()
        _, optimizer = wrap(model, host_memory="64MiB", device_memory="4MiB")
    return optimizer.plan.host_bytes, [str(each.message) for each in caught]


def test_less_free_memory_than_all_ranks_of_a_machine_take() -> None:
    (taken, said), _ = on_ranks(2, little_memory, None)
    assert not said
    assert on_ranks(2, little_memory, 2 * taken) == [(taken, [])] * 2
    (_, [warned]), (_, other) = on_ranks(2, little_memory, 2 * taken - 1)
    assert warned.startswith(f"the plan takes {format_bytes(2 * taken)} of this machine's host memory, and ")
    assert not other


# -- profiles ----------------------------------------------------------------------------------------------------------


def profile_with_a_slow_rank(rank: int) -> int:
    """The steps of the profile seem long on rank 1 and short on rank 0. Returns how often forward was called."""
    durations, slow, calls = step_times.durations, 1e6 if rank else 1.0, list[int]()

    def meet(*_: object) -> None:
        """Wait for the other rank, as a forward with collectives of its own does."""
        calls.append(1)
        dist.all_reduce(torch.ones(1))

    def seeming(segments: Any) -> Any:
        return [(whole * slow, recomputed) for whole, recomputed in durations(segments)]

    def timed(*args: Any, **options: Any) -> Any:
        return step_times.time_steps(*args, **{**options, "sustained_ms": 60000.0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapping, "cached_profile", cache.cached_profile)
        patch.setattr(step_times, "durations", seeming)
        patch.setattr(trace, "time_steps", timed)
        model = make()
        model.register_forward_pre_hook(meet)
        wrap(model)
    return len(calls)


def test_a_slow_rank_decides_how_many_steps_all_time() -> None:
    assert on_ranks(2, profile_with_a_slow_rank) == [3, 3], "one measures memory, and of two more the second counts"


def profile_with_a_full_rank(rank: int) -> tuple[str, float]:
    """Rank 1 has no memory for a profile of a run, and counts it. Returns the plan, and the loss of a step."""
    profiles: list[int] = []

    def profile(*args: Any, **options: Any) -> Any:
        profiles.append(1)
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return trace.profile(*args, **options)

    with pytest.MonkeyPatch.context() as patch, seeded():
        patch.setattr(wrapping, "cached_profile", cache.cached_profile)
        patch.setattr(cache, "profile", profile)
        model, optimizer = wrap(make())
    assert len(profiles) == 1
    return str(optimizer.plan), step(model, optimizer, batch(0))


def test_a_rank_without_memory_for_a_profile_leaves_the_others_theirs() -> None:
    first, other = on_ranks(2, profile_with_a_full_rank)
    assert first == other


# -- where ranks start from --------------------------------------------------------------------------------------------


def start(rank: int, build: Callable[[int], nn.Module]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values that a rank builds, and those that it has after wrap."""
    model = build(rank)
    built = {} if next(model.parameters()).is_meta else {n: p.detach().clone() for n, p in model.named_parameters()}
    ids = torch.zeros(1, 8, dtype=torch.int64)
    wrapped, _ = wrap(model, example_batch={"input_ids": ids, "labels": ids})
    return built, {name: value.clone() for name, value in wrapped.state_dict().items()}


def seeded_by_rank(rank: int) -> nn.Module:
    """Half of the parameters differ between ranks, by a single bit at least."""
    model = tiny("gpt2")
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if index % 2:
                parameter.view(-1)[-1] += rank
    return model


@pytest.mark.slow
def test_the_values_of_the_first_rank() -> None:
    (first, mine), (other, theirs), _ = on_ranks(3, start, seeded_by_rank)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    for name, value in first.items():
        assert torch.equal(mine[name], value), name
        assert torch.equal(theirs[name], value), name


def empty(rank: int) -> nn.Module:
    torch.manual_seed(5 + rank)
    with protrain.empty_parameters():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(tiny_config("mixtral", {}))
    return model


@pytest.mark.slow
def test_empty_parameters_are_made_as_on_one_rank_with_the_seed_of_the_first() -> None:
    (_, mine), (_, theirs) = on_ranks(2, start, empty)
    _, alone = start(0, empty)
    assert_same(mine, alone)
    assert_same(theirs, alone)


# -- process groups ----------------------------------------------------------------------------------------------------


def wrap_with(rank: int, what: str) -> None:
    from torch.distributed.fsdp import fully_shard  # these take seconds to import
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, options = make(), dict[str, Any]()
    if what == "tensor parallelism":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model.get_submodule("blocks.0"), mesh["tp"], {"first": ColwiseParallel()})
    elif what == "HSDP":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    elif what == "mesh":
        options["process_group"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    else:
        options["process_group"] = what
    wrap(model, **options)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("tensor parallelism", "parameter blocks.0.first.weight is a DTensor, .* tensor, context or pipeline "),
        ("HSDP", r"parameter enter.weight is a DTensor, .* replicas of shards \(HSDP\)"),
        ("mesh", r"process_group must be a .*, not a DeviceMesh\. .*mesh\[name\].get_group\(\).*\(HSDP\)"),
        ("dp", "process_group must be a torch.distributed.ProcessGroup, not a str"),
    ],
)
def test_parallelism_that_is_refused(what: str, said: str) -> None:
    for error in errors_on(2, wrap_with, what):
        assert re.match(f"ValueError: {said}", error), error
