"""A step that is counted under autocast has the types that a GPU would compute in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protrain
from protrain.profiler.meta_device import as_if_on_gpu

WIDTH, ROWS = 32, 64
CPU_AUTOCAST = ("cpu", torch.bfloat16)  # the rules on a CPU are others, and those of a GPU are applied
NARROW, WIDE = torch.bfloat16, torch.float32

Call = Callable[[Tensor, Tensor], Tensor]
# Each is given a matrix in bf16 and one in fp32.
CALLS: dict[str, tuple[torch.dtype, Call]] = {
    "linear": (NARROW, F.linear),
    "matmul": (NARROW, torch.matmul),
    "@": (NARROW, lambda x, y: y @ x),
    "einsum": (NARROW, lambda x, y: torch.einsum("ij,jk->ik", x, y)),
    "convolution": (NARROW, lambda x, y: F.conv1d(y[None], x[..., None])),
    "attention": (NARROW, lambda x, y: F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])),
    "layer norm": (WIDE, lambda x, y: F.layer_norm(x, [8], x[0], x[0])),
    "softmax": (WIDE, lambda x, y: x.softmax(-1)),
    "cross entropy": (WIDE, lambda x, y: F.cross_entropy(x, x.argmax(-1))),
    "power": (WIDE, lambda x, y: x**2),
    "sum": (WIDE, lambda x, y: x.sum(0)),
    "by terms": (WIDE, lambda x, y: torch.addcmul(x, y, x)),
    "sum of two": (WIDE, lambda x, y: x + y),
    "relu": (NARROW, lambda x, y: F.relu(x)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_type_of_a_result(name: str) -> None:
    expected, call = CALLS[name]
    x, y = (torch.empty(16, 8, dtype=dtype, device="meta")[:8] for dtype in (NARROW, WIDE))
    with as_if_on_gpu(), torch.autocast(*CPU_AUTOCAST):
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


def test_a_model_that_mixes_types_is_counted_under_autocast() -> None:
    batch = (torch.randn(ROWS, WIDTH),)
    with torch.autocast(*CPU_AUTOCAST):
        assert len(protrain.profile(Mixed(), batch, device="meta", dtype=torch.bfloat16).blocks) == 3
    if torch.__version__ < "2.12":
        return  # where the meta device multiplies two types
    with pytest.raises(RuntimeError, match="but found") as caught:
        protrain.profile(Mixed(), batch, device="meta", dtype=torch.bfloat16)
    assert "call the model under torch.autocast" in " ".join(caught.value.__notes__)
