"""Peers that cannot be built are left out with their reason, and built for the GPU at hand."""

from __future__ import annotations

import os

import pytest
import torch

from bench.kernels.peers import built


def test_a_peer_that_does_not_build_is_skipped_with_its_reason() -> None:
    def make() -> int:
        raise ValueError("no\ncompiler")

    with pytest.raises(pytest.skip.Exception, match=r"FusedAdam 0\.1 doesn't build: no compiler"):
        built("FusedAdam 0.1", make)


@pytest.mark.gpu
def test_a_peer_is_built_for_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a 10.0a")
    major, minor = torch.cuda.get_device_capability()
    assert built("it", lambda: os.environ["TORCH_CUDA_ARCH_LIST"]) == f"{major}.{minor}"
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0a 10.0a"
