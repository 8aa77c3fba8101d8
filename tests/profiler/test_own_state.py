"""Each run of a traced step gets its own containers, caches, buffers and module state, and is counted as what it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError
from protrain.profiler.memory_meter import StorageMeter
from tests.profiler.test_trace import _Block

profile = partial(protrain.profile, device="cpu")


class _Watching(_Block):
    """Notes what each of its runs finds, before it changes that."""

    found: ClassVar[list[Any]] = []  # of the class, so that a profile does not put it back

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.history: list[int] = []
        self.register_buffer("count", torch.tensor(0))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.found.append((self.calls, int(self.count), float(np.random.random())))
        self.calls += 1
        self.history.append(self.calls)
        self.count += 1
        return super().forward(x)


def test_every_run_of_a_block_finds_what_the_first_found() -> None:
    """To be measured, in the step, recomputed in backward, and the last two again in the steps that are timed."""
    model = nn.Sequential(*(_Watching() for _ in range(2)))
    _Watching.found.clear()
    np.random.seed(3)
    profile(model, (torch.randn(4, 8),))
    np.random.seed(3)
    first, second = np.random.random(), np.random.random()
    found = _Watching.found
    assert found[:6] == [(0, 0, first)] * 2 + [(0, 0, second)] * 3 + [(0, 0, first)]
    assert len(found) >= 6 + 4
    assert set(found[6:]) == {(0, 0, first), (0, 0, second)}
    for block in model:
        assert isinstance(block, _Watching)
        assert (block.calls, block.history, int(block.count)) == (0, [], 0)


class _Large(_Block):
    """Changes a buffer that is too large to be copied before every run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1 << 17))
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.table.add_(1)
        return super().forward(x) * self.table[0]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_large_buffers_come_out_as_they_went_in(device: str) -> None:
    model = nn.Sequential(*(_Large() for _ in range(2)))
    profile(model, (torch.randn(4, 8),), device=device)
    assert all(not block.get_buffer("table").any() for block in model)


class _Cached(nn.Module):
    """Adds keys and values to a cache in every block, that of the batch or one of its own."""

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_AddsToCache(index) for index in range(3))
        self.cache = cache

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        cache = self.cache if cache is None else cache
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x.mean()


class _AddsToCache(_Block):
    lengths: ClassVar[list[int]] = []

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        keys, _ = cache.update(x[:, None], x[:, None], self.index)
        self.lengths.append(keys.shape[2])
        return super().forward(x + keys.mean((1, 2))[:, None])


def _filled_cache() -> Any:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    for index in range(3):
        cache.update(torch.full((2, 1, 5, 8), float(index)), torch.zeros(2, 1, 5, 8), index)
    return cache


@pytest.mark.parametrize("where", ["batch", "attribute"])
def test_a_cache_grows_once_in_every_run(where: str) -> None:
    cache = _filled_cache()
    in_batch = where == "batch"
    _AddsToCache.lengths.clear()
    batch = {"x": torch.randn(2, 4, 8), **({"cache": cache} if in_batch else {})}
    profile(_Cached(None if in_batch else cache), batch)
    assert set(_AddsToCache.lengths) == {5 + 4}
    for index, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys, torch.full((2, 1, 5, 8), float(index)))


def test_a_cache_that_is_written_to_is_refused_by_name() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=3, max_position_embeddings=16
    )
    cache = transformers.StaticCache(config=config, max_cache_len=16)
    cache.early_initialization(batch_size=2, num_heads=1, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(MisuseError, match=r"layers\.2 needs its inputs.* static cache"):
        profile(_Cached(cache), (torch.randn(2, 4, 8),))


_INDICES, _VALUES = torch.arange(8), torch.ones(8)


@pytest.mark.parametrize(
    ("make", "size_bytes"),
    [
        (lambda: torch.sparse_coo_tensor(torch.stack([_INDICES, _INDICES]), _VALUES * 1, (8, 8)), 8 * 4 + 2 * 8 * 8),
        (lambda: torch.sparse_csr_tensor(torch.arange(9), _INDICES * 1, _VALUES * 1, (8, 8)), 8 * 4 + (9 + 8) * 8),
        (lambda: torch.sparse_csc_tensor(torch.arange(9), _INDICES * 1, _VALUES * 1, (8, 8)), 8 * 4 + (9 + 8) * 8),
        (
            lambda: torch.sparse_bsr_tensor(torch.arange(5), torch.arange(4), torch.ones(4, 2, 2), (8, 8)),
            4 * 4 * 4 + (5 + 4) * 8,
        ),
    ],
    ids=["coo", "csr", "csc", "bsr"],
)
def test_sparse_tensors_are_counted_by_their_parts(make: Callable[[], Tensor], size_bytes: int) -> None:
    with StorageMeter() as meter:
        made = make()
        assert meter.alive_bytes == size_bytes
        del made
        assert meter.alive_bytes == 0
    given = make()
    with StorageMeter() as meter:
        meter.count([given])
        assert meter.alive_bytes == size_bytes
