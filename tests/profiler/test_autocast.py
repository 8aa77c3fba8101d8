"""A step under autocast: its casts end with it, and on the meta device it has the types that a GPU would compute in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import protrain
from protrain.profiler.meta_device import as_if_on_gpu
from protrain.wrapping import change_forwards

WIDTH, LAYERS, ROWS = 32, 3, 64


class _CastsOfWeights(TorchDispatchMode):
    """Counts how often a weight is cast to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        self.count += is_cast and result.shape == (WIDTH, WIDTH)
        return result


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def test_casts_of_weights_do_not_outlast_a_step() -> None:
    """Autocast keeps them until its context ends, which is around all of the profile here."""
    with torch.autocast("cpu", dtype=torch.bfloat16), _CastsOfWeights() as casts:
        protrain.profile(Layers(), {"x": torch.randn(4, WIDTH)}, device="cpu", dtype=torch.float32)
        assert casts.count >= 2 * LAYERS, "in the step that is measured, and in each one that is timed"


CPU_AUTOCAST = ("cpu", torch.bfloat16)  # the rules on a CPU are others, and those of a GPU are applied
NARROW, WIDE = torch.bfloat16, torch.float32

Call = Callable[[Tensor, Tensor], Tensor]
# Each is given a matrix in bf16 and one in fp32.
CALLS: dict[str, Call] = {
    "linear": F.linear,
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "convolution": lambda x, y: F.conv1d(y.unsqueeze(0), x.unsqueeze(2)),
    "attention": lambda x, y: F.scaled_dot_product_attention(
        y.view(1, 1, 8, 8), y.view(1, 1, 8, 8), y.view(1, 1, 8, 8)
    ),
    "layer norm": lambda x, y: F.layer_norm(x, [8], x.select(0, 0), x.select(0, 0)),
    "softmax": lambda x, y: x.softmax(-1),
    "cross entropy": lambda x, y: F.cross_entropy(x, x.argmax(-1)),
    "sum": lambda x, y: x.sum(0),
    "by terms": lambda x, y: torch.addcmul(x, y, x),
    "sum of two": lambda x, y: x + y,
}


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """torch.autocast for the tensors of a GPU, whether there is one or not."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", NARROW)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("name", CALLS)
def test_the_type_of_a_result_is_that_on_a_gpu(name: str, on_gpu: None) -> None:
    call = CALLS[name]
    with FakeTensorMode():
        expected = call(*(torch.empty(8, 8, dtype=dtype, device="cuda") for dtype in (NARROW, WIDE))).dtype
    with as_if_on_gpu():
        x, y = (torch.empty(8, 8, dtype=dtype, device="meta") for dtype in (NARROW, WIDE))
        assert call(x, y).dtype == expected


def test_where_autocast_is_off_nothing_is_cast() -> None:
    x = torch.empty(8, 8, dtype=NARROW, device="meta")
    with as_if_on_gpu(), torch.autocast(*CPU_AUTOCAST), torch.autocast("cpu", enabled=False):
        assert x.softmax(-1).dtype == NARROW


class Rows(nn.Module):
    """Blocks of a norm and a layer, perhaps under autocast of its own, as clients put it around a forward."""

    def __init__(self, own_autocast: bool = False) -> None:
        super().__init__()
        self.own_autocast = own_autocast
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.register_buffer("table", torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(*CPU_AUTOCAST, enabled=self.own_autocast or torch.is_autocast_enabled("cpu")):
            for block in self.blocks:
                x = block(x)
            return x


def test_what_compiled_blocks_save_is_counted_in_its_type() -> None:
    torch.compiler.reset()  # the tests before may have used up the recompilations of a function

    def saved_bytes(under: bool) -> list[int]:
        model = Rows()
        longer = (nn.Sequential(*block.children(), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for block in model.blocks)
        model.blocks = nn.ModuleList(longer)
        undo = change_forwards(model, None, compile=True, chunked_loss=False, on_meta=True)
        with torch.autocast(*CPU_AUTOCAST, enabled=under):
            profile = protrain.profile(model, (torch.randn(ROWS, WIDTH),), device="meta", dtype=torch.float32)
        undo()
        return [block.saved_bytes for block in profile.blocks]

    elements, statistics = ROWS * WIDTH, 2 * ROWS * 4
    # What the first layer returns is saved, in bf16 under autocast. Backward computes anew what norm and GELU return.
    assert saved_bytes(under=False) == [4 * elements + statistics] * 3
    assert saved_bytes(under=True) == [2 * elements + statistics] * 3


@pytest.mark.parametrize("own", [False, True])
def test_what_blocks_save_is_counted_in_its_type(own: bool) -> None:
    def saved_bytes(under: bool) -> list[int]:
        with torch.autocast(*CPU_AUTOCAST, enabled=under and not own):
            model, batch = Rows(own_autocast=under and own), (torch.randn(ROWS, WIDTH),)
            profile = protrain.profile(model, batch, device="meta", dtype=torch.bfloat16)
        return [block.saved_bytes for block in profile.blocks]

    elements, statistics = ROWS * WIDTH, 2 * ROWS * 4
    # The norm saves its input, which without autocast is that of the block, and the layer saves what the norm returns.
    assert saved_bytes(under=False) == [2 * elements + statistics] * 3
    # Both are copies under autocast: the input in fp32, with weight and bias, and the output in bf16.
    assert saved_bytes(under=True) == [4 * elements + statistics + 2 * WIDTH * 4 + 2 * elements] * 3


class Mixed(Rows):
    """It multiplies bf16 by a table in fp32, which only autocast takes."""

    table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(super().forward(x)[None], self.table[None])


@pytest.mark.parametrize("compile", [False, True])
def test_a_model_that_mixes_types_is_counted_under_autocast(compile: bool) -> None:
    batch, model = (torch.randn(ROWS, WIDTH),), Mixed()
    undo = change_forwards(model, batch, compile=compile, chunked_loss=False, on_meta=True)
    with torch.autocast(*CPU_AUTOCAST):
        assert len(protrain.profile(model, batch, device="meta", dtype=torch.bfloat16).blocks) == 3
    undo()
    if torch.__version__ < "2.12":
        return  # where the meta device multiplies two types
    with pytest.raises(RuntimeError, match="but found") as caught:
        protrain.profile(Mixed(), batch, device="meta", dtype=torch.bfloat16)
    assert "call the model under torch.autocast" in " ".join(caught.value.__notes__)
