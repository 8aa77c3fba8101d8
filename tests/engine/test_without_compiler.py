"""Without a C compiler updates on the host are slower, which is said once, and the bits are the same."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
_TRAINING = """
    import hashlib, sys, torch, warnings
    import protrain

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        batch = (torch.randn(4, 16),)
        model, optimizer = protrain.wrap(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), example_batch=batch, device="cpu",
            dtype="float32", device_memory="18KiB", host_memory="1GiB", progress=False,
            accumulation=2,
        )
        print("at wrap:", sum("Falling back" in str(warning.message) for warning in caught))
        for _ in range(3):
            for _ in range(2):
                model(*batch).float().square().mean().backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        names = [name for name, _ in model.named_parameters()]
        weights = torch.cat([optimizer.export_parameter(name)["master"].view(-1) for name in names])
    told = [str(warning.message) for warning in caught if "Falling back" in str(warning.message)]
    print("in all:", len(told), *told)
    offloads = optimizer.plan.n_persist < optimizer.plan.n_chunks
    print("bits:", hashlib.sha256(weights.numpy().tobytes()).hexdigest(), offloads)
"""


def _trained_here() -> dict[str, str]:
    """With the compiled library that this process has."""
    with redirect_stdout(io.StringIO()) as printed, torch.random.fork_rng(devices=[]):
        exec(textwrap.dedent(_TRAINING), {})
    return dict(line.split(": ", 1) for line in printed.getvalue().splitlines())


def _trained(environment: dict[str, str]) -> dict[str, str]:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_TRAINING)],
        env={**environment, "PYTHONPATH": str(REPOSITORY), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return dict(line.split(": ", 1) for line in result.stdout.splitlines())


@pytest.mark.slow
def test_without_a_c_compiler_it_says_so_once_and_trains_the_same(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LD_LIBRARY_PATH", "TMPDIR")}
    empty = tmp_path / "bin"
    empty.mkdir()
    without = _trained({**kept, "PATH": str(empty), "PROTRAIN_CACHE": str(tmp_path / "cache")})
    assert without["at wrap"] == "1"
    assert without["in all"].startswith(
        "1 host kernels: no C compiler found. Falling back to separate torch operations"
    )
    assert "Install gcc or clang with OpenMP" in without["in all"]
    with_compiler = _trained_here()
    assert with_compiler["in all"] == "0"
    assert without["bits"] == with_compiler["bits"]
    assert without["bits"].endswith("True"), "nothing was offloaded"
