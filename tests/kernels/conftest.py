"""The implementations that must agree: C, the torch fallback, and Triton (on a GPU, else in its interpreter)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

import protrain_kernels as kernels
from protrain_kernels import host_library
from protrain_kernels.adam import launch_adam
from protrain_kernels.flatten import launch_flatten, launch_unflatten, table_for
from protrain_kernels.fold import launch_fold
from protrain_kernels.fold import table_for as fold_table_for
from protrain_kernels.from_host import launch_from_host

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Backend:
    """Where a kernel runs. In the interpreter the launcher is called: a public function would send CPU tensors to C."""

    name: str
    device: torch.device

    @property
    def interpreted(self) -> bool:
        return self.name == "triton" and self.device.type == "cpu"

    def adam(self, *tensors: Any, **options: Any) -> None:
        (launch_adam if self.interpreted else kernels.adam)(*tensors, **options)

    def sum_of_squares(self, values: torch.Tensor, *, weight_dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The partials that ``flatten`` writes of values that it leaves in their place."""
        padded = torch.zeros(kernels.padded(values.numel()), dtype=values.dtype, device=values.device)
        padded[: values.numel()] = values
        before = padded.clone()
        partials = torch.full((kernels.tiles(values.numel()),), torch.nan, device=values.device)
        self.flatten([padded[: values.numel()]], padded, [0], partials, [0], weight_dtype=weight_dtype)
        assert torch.equal(padded.view(torch.uint8), before.view(torch.uint8))
        return partials

    def flatten(
        self,
        tensors: list[torch.Tensor],
        chunk: torch.Tensor,
        offsets: list[int],
        partials: torch.Tensor | None = None,
        starts: list[int] | None = None,
        *,
        accumulate: bool = False,
        **options: Any,
    ) -> None:
        if self.interpreted:
            table = table_for(tensors, offsets, starts)
            launch_flatten(table, tensors, chunk, partials, accumulate=accumulate, **options)
        else:
            kernels.flatten(tensors, chunk, offsets, partials, starts, accumulate=accumulate, **options)

    def unflatten(self, chunk: torch.Tensor, tensors: list[torch.Tensor], offsets: list[int]) -> None:
        if self.interpreted:
            launch_unflatten(table_for(tensors, offsets, None), chunk, tensors)
        else:
            kernels.unflatten(chunk, tensors, offsets)

    def fold(self, pieces: torch.Tensor, slices: Sequence[kernels.Slice], **options: Any) -> None:
        if self.interpreted:
            usual: dict[str, Any] = {"accumulator": None, "partials": None}
            launch_fold(fold_table_for(tuple(slices), pieces.device), pieces, **usual | options)
        else:
            kernels.fold(pieces, slices, **options)

    def from_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        (launch_from_host if self.interpreted else kernels.from_host)(source, target)

    def pack(self, tensors: list[torch.Tensor]) -> kernels.Packed:
        with pytest.MonkeyPatch.context() as patch:  # the package's attribute of that name is the function
            patch.setattr(importlib.import_module("protrain_kernels.pack"), "flatten", self.flatten)
            return kernels.pack(tensors)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter prepares the language once, and not at every call of one jit function from another.

    To look through the language for what is to be replaced took a third of the time of these tests.
    """
    prepare = interpreter._patch_lang
    prepared: set[frozenset[Any]] = set()

    def prepare_once(function: Any) -> Any:
        languages = frozenset(each for each in function.__globals__.values() if each is tl or each is tl.core)
        if languages not in prepared:
            prepare(function)
            prepared.add(languages)
        return SimpleNamespace(restore=lambda: None)  # which is asked for after every launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", prepare_once)
        yield


_TRITON = pytest.param("triton", marks=[pytest.mark.gpu] if torch.cuda.is_available() else [])


@pytest.fixture(params=["c", "aten", _TRITON])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    name: str = request.param
    monkeypatch.delenv("PROTRAIN_HOST_KERNELS", raising=False)
    if name == "aten":
        monkeypatch.setenv("PROTRAIN_HOST_KERNELS", "aten")
        # By name: the package's attribute "adam" is the function. So a few thousand elements go in several slices.
        monkeypatch.setattr(importlib.import_module("protrain_kernels.adam"), "REFERENCE_SLICE", 512)
    elif name == "c" and host_library.library() is None:
        pytest.skip("no compiler for the host kernels")
    on_gpu = name == "triton" and torch.cuda.is_available()
    return Backend(name, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))


@pytest.fixture(params=[_TRITON])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """Where the Triton kernels run: on a GPU, or on the CPU in the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled host kernels, whatever the environment asks for."""
    monkeypatch.delenv("PROTRAIN_HOST_KERNELS", raising=False)
    if host_library.library() is None:
        pytest.skip("no compiler for the host kernels")


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """Nothing is loaded at the start, and what the test loaded is forgotten at its end."""
    host_library._load.cache_clear()
    yield
    host_library._load.cache_clear()


SameBits = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.fixture
def same_bits() -> SameBits:
    """Asserts equal bits, so that -0 isn't 0; any NaN equals any other, since machines choose its payload."""

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        found, expected = found.cpu(), expected.cpu()
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        integers = _INTEGERS[found.element_size()]
        differ = found.view(integers) != expected.view(integers)
        if found.is_floating_point():
            differ &= ~(found.isnan() & expected.isnan())
        where = differ.nonzero().flatten().tolist()
        assert not where, (
            f"{len(where)} of {found.numel()} differ, first at {where[0]}: {found[where[0]]} != {expected[where[0]]}"
        )

    return check


@pytest.fixture
def any_bits() -> Callable[[int, int], torch.Tensor]:
    """``any_bits(seed, count)``: fp32 of random bit patterns, with subnormals, infinities and NaN among them."""

    def make(seed: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
        values = bits.view(torch.float32)
        special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38])
        values[: len(special)] = special
        values[len(special) : len(special) + 3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
        return values

    return make
