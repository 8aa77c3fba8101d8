"""Batches from host memory: the same values, whatever becomes of the caller's tensors and is queued on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from protrain.engine.inputs import Inputs
from protrain.engine.streams import Streams, streams_for


class _Own(Tensor):
    """A class of its own, which only its own methods know how to move."""


_EXPECTED: dict[str, Tensor] = {
    "numbers": torch.arange(37) * 10**12,
    "conjugate": torch.complex(torch.randn(5), torch.randn(5)).conj(),
    "halves": torch.randn(3, 4, 5).to(torch.bfloat16),
    "columns": torch.randn(4, 6).t(),
    "every second": torch.randn(8, 6)[::2, ::3],
    "one for all": torch.randn(3, 1).expand(3, 4),
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "differentiated": torch.randn(3, requires_grad=True),
    "own class": torch.randn(4).as_subclass(_Own),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def inputs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """On a CPU as if what is there were elsewhere."""
    device = torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        monkeypatch.setattr(Inputs, "_is_here", lambda *_: False)
    return Inputs(device, streams_for(device))


@pytest.mark.parametrize("name", _EXPECTED)
def test_inputs_have_the_same_values_type_and_layout(inputs: Inputs, name: str) -> None:
    tensor = _EXPECTED[name]
    expected, layout = tensor.detach().clone(), torch.empty_like(tensor)
    given = {"batch": [(tensor,)], "other": "text"}
    moved = inputs.to_device(given)
    found = moved["batch"][0][0]
    assert moved["other"] == "text"
    assert (type(found), found.device.type, found.dtype) == (type(tensor), inputs._device.type, tensor.dtype)
    assert (found.shape, found.stride()) == (layout.shape, layout.stride())
    assert torch.equal(found.detach().cpu().as_subclass(Tensor), expected.as_subclass(Tensor))
    assert found.requires_grad == tensor.requires_grad


def test_the_caller_may_change_what_it_gave(inputs: Inputs) -> None:
    given = torch.arange(100_000)
    work = torch.zeros(4096, 4096, device=inputs._device)
    for _ in range(20 if work.is_cuda else 0):
        work = work @ work
    for _ in range(2):
        given.copy_(torch.arange(100_000))
        moved = inputs.to_device((given,))[0]
        given.fill_(-1)
        assert torch.equal(moved.cpu(), torch.arange(100_000))


def test_what_is_there_is_not_copied() -> None:
    given = torch.arange(5)
    assert Inputs(torch.device("cpu"), Streams()).to_device([given])[0] is given


@pytest.mark.parametrize("kind", ["sparse", "dual"])
def test_other_tensors_are_moved_by_their_own_means(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inputs, "_is_here", lambda *_: False)
    inputs = Inputs(torch.device("cpu"), Streams())
    dense = torch.randn(4, 3)
    if kind == "dual":
        with forward_ad.dual_level():
            moved = inputs.to_device(forward_ad.make_dual(dense, tangent := torch.randn(4, 3)))
            assert torch.equal(forward_ad.unpack_dual(moved).tangent, tangent)
    else:
        assert torch.equal(inputs.to_device(dense.to_sparse()).to_dense(), dense)
    assert not inputs._in_flight


@pytest.mark.gpu
def test_the_thread_does_not_wait_for_what_is_queued() -> None:
    device = torch.device("cuda", 0)
    inputs = Inputs(device, streams_for(device))
    batch = {"ids": torch.arange(1 << 16), "image": torch.randn(8, 3, 224, 224), "mask": torch.ones(9) > 0}
    inputs.to_device(batch)  # compiles, and takes pinned memory
    work = torch.randn(8192, 8192, device=device)
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    for _ in range(50):
        work @ work
    done.record()
    moved = inputs.to_device(batch)
    assert not done.query(), "some second"
    for name, tensor in batch.items():
        assert torch.equal(moved[name].cpu(), tensor)
