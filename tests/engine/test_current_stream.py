"""Kernels of another stream than the one that copies are ordered with: refused before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from protrain.common.errors import MisuseError
from protrain.engine.streams import CudaStreams
from tests.engine.harness import CKPT, Spec, adamw, assert_same, default_loss, states, wrap_under
from tests.engine.residual import batches, make


def test_forward_and_step_on_another_stream_are_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for misused in (False, True):
        model, spec = make(), Spec("none", "least", (CKPT,))
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=device)
        streams = optimizer._engine.streams
        if not isinstance(streams, CudaStreams):  # as if it were
            named = CudaStreams.__new__(CudaStreams)
            vars(named).update(device=device, compute=SimpleNamespace(stream="compute"))
            monkeypatch.setattr(streams, "refuse_another", named.refuse_another)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "compute")

        @contextmanager
        def another_stream() -> Iterator[None]:
            with monkeypatch.context() as patch:
                if device.type == "cuda":
                    with torch.cuda.stream(torch.cuda.Stream(device)):
                        yield
                else:
                    patch.setattr(torch.cuda, "current_stream", lambda _: "another")
                    yield

        torch.manual_seed(1)
        if misused:
            with another_stream(), pytest.raises(MisuseError, match="the current CUDA stream is not the one"):
                wrapped(*batches()[0])
        default_loss(wrapped, batches()[0]).backward()
        if misused:
            with another_stream(), pytest.raises(MisuseError, match=r"outside `with torch.cuda.stream\(...\)`"):
                optimizer.step()
        optimizer.step()
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True])
def test_backward_alone_may_be_called_on_another_stream(inside: bool) -> None:
    results = []
    cuda = torch.device("cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        model = make(width=1024)
        wrapped, optimizer = wrap_under(
            Spec("some", "least", (CKPT,)), model, adamw(model), batches()[0], device=cuda, step_during_backward=inside
        )
        for batch in batches():
            torch.manual_seed(1)
            loss = default_loss(wrapped, batch)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])
