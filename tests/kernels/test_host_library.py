"""The host library is built once, atomically, and with a fallback that says why; its calls leave the GIL free."""

from __future__ import annotations

import ctypes
import platform
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from protrain_kernels import (
    adam,
    adam_reference,
    adam_scalars,
    flatten,
    host_kernels,
    host_library,
    sum_of_squares_reference,
)
from protrain_kernels.host_library import FLAGS, build, library, open_library
from tests.kernels.states import SCALARS, every_half, random_states, same_bits


@pytest.fixture
def compiler() -> list[str]:
    """The first that is found. ProTrain needs one, so there is one wherever these tests run."""
    return host_library._compilers()[0]


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is loaded or compiled at the start, and what the test loaded is forgotten at its end."""
    monkeypatch.setenv("PROTRAIN_CACHE", str(tmp_path / "cache"))
    library.cache_clear()
    yield tmp_path / "cache"
    library.cache_clear()


def _agrees(dtype: torch.dtype = torch.float32) -> bool:
    found, expected = random_states(4096, dtype), random_states(4096, dtype)
    grad = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    adam(*found, grad, SCALARS)
    adam_reference(*expected, grad, SCALARS)
    return all(a is None or b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_builders_at_once_leave_one_library_that_is_built_once(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is compiled from one small function, as only its file counts here."""
    source, folder = tmp_path / "answer.c", tmp_path / "cache"
    source.write_text("int answer(void) { return 42; }\n")
    monkeypatch.setattr(host_library, "SOURCES", (str(source),))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build(compiler, FLAGS, folder), range(2))
    assert first == second
    assert list(folder.iterdir()) == [first]
    assert ctypes.CDLL(str(first)).answer() == 42
    stamp = first.stat().st_mtime_ns
    assert build(compiler, FLAGS, folder) == first
    assert first.stat().st_mtime_ns == stamp
    assert build(compiler, (*FLAGS, "-DOTHER"), folder) != first


def test_an_unwritable_cache_gives_way(
    compiler: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PROTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(host_library, "FLAGS", ("-O0", *FLAGS[1:]))  # quick, as nothing computes with it
    with pytest.warns(RuntimeWarning, match=r"file/cache cannot be written \(Not a directory\).* let PROTRAIN_CACHE"):
        assert library() is not None


def test_without_a_compiler_it_warns_once_and_works(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match=r"no-such-compiler.*Install gcc or clang"):
        assert _agrees()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _agrees()


def test_a_failing_compiler_is_quoted(empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "broken-cc"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "cannot find -lgomp" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.warns(RuntimeWarning, match="cannot find -lgomp"):
        assert library() is None
    assert list(empty_cache.iterdir()) == []


@pytest.mark.slow
def test_baseline_instructions_give_the_same_bits(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without F16C the half conversions are software: every half, and fp32 values around every rounding boundary."""
    if platform.machine() != "x86_64":
        pytest.skip("other machines have their own baseline")
    flags = tuple("-march=x86-64" if flag.startswith(("-march", "-mcpu")) else flag for flag in FLAGS)
    monkeypatch.setattr(host_kernels, "library", partial(open_library, build(compiler, flags, tmp_path)))
    assert _agrees()
    assert _agrees(torch.float16)
    halves = every_half(torch.float16)
    partials = torch.zeros(4)
    flatten([halves], torch.zeros(1 << 16), [0], partials, [0])
    same_bits(partials, sum_of_squares_reference(halves))
    # A step of length zero leaves the master alone and rounds it to the half weight.
    step = adam_scalars(lr=0.0, beta1=0.9, beta2=0.99, eps=1.0, weight_decay=0.0, step=1, decoupled=True)
    bits = halves.float().view(torch.int32)
    for nudge in (-0x1001, -0x1000, -0xFFF, -1, 0, 1, 0xFFF, 0x1000, 0x1001):
        master = (bits + nudge).view(torch.float32)
        weight = torch.full((1 << 16,), torch.nan, dtype=torch.float16)
        exp_avg, exp_avg_sq, grad = torch.zeros(3, 1 << 16)
        adam(weight, master, exp_avg, exp_avg_sq, grad, step)
        same_bits(weight, master.half())


def test_other_threads_run_during_a_call(compiled: None) -> None:
    """A library that held the GIL would let the main thread count to next to nothing."""
    scalars = adam_scalars(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1, decoupled=True)
    weight, exp_avg, exp_avg_sq, grad = torch.zeros(4, 1 << 23)
    most = 0
    for _ in range(10):  # a busy machine may give the main thread no core for a while
        inside, count = threading.Event(), 0

        def call(inside: threading.Event = inside) -> None:
            inside.set()
            adam(weight, None, exp_avg, exp_avg_sq, grad, scalars, threads=1)

        thread = threading.Thread(target=call)
        thread.start()
        inside.wait()
        while thread.is_alive():
            count += 1
        most = max(most, count)
        if most > 2000:
            break
    assert most > 2000
