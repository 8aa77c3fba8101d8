"""Models of every structure have the plain loop's bits: what the modules do with parameters is theirs to decide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError
from tests.engine import awkward, families, residual
from tests.engine.harness import FEW_PLANS, Batch, Loop, Spec, adamw, check_equal_to_plain, wrap_under

WIDTH = 24


class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(WIDTH, 4, batch_first=True)  # uses its out_proj without calling it
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.pool(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0]


class NoBlocks(nn.Module):
    """It gives a weight storage of its own in every forward, too, as recurrent modules do on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 40)
        self.scale = nn.Parameter(torch.ones(40))
        self.recurrent = nn.GRU(40, 16, batch_first=True)
        self.last = nn.Bilinear(16, 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.recurrent.flatten_parameters()
        self.first.weight.data = self.first.weight.data.clone()
        x = self.recurrent(torch.tanh(self.first(x)) * self.scale)[0]
        return self.last(x, x)


class Ordered(nn.Module):
    """An integer parameter, spare blocks, one block that is called twice, and two that run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(residual.Block(WIDTH) for _ in range(5))
        self.blocks[:2].requires_grad_(False)
        self.spare_blocks = nn.ModuleList(residual.Block(WIDTH) for _ in range(2))
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks[:2]:
                x = block(x)
        for block in (*self.blocks[2:], self.blocks[3]):
            x = block(x[..., self.order])
        return x


class Inplace(nn.Module):
    """Blocks that write into what they are given and return views of it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            y[:, ::2].mul_(0.5)
            y.relu_()
            return y.transpose(0, 1), y[0]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        sums = []
        for layer in self.layers:
            y, first = layer(x)
            x = x + y.transpose(0, 1)
            sums.append(first)
        return x.float().square().mean() + torch.stack(sums).float().std()


class Scaled(nn.Module):
    """With a parameter that has no dimension, and one that has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(8, 8), nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.gain


class Spectral(nn.Module):
    """A filter in frequency space, whose real parameter of shape (..., 2) forward takes for complex numbers."""

    def __init__(self, width: int, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.form, self.width = form, width
        self.weight = nn.Parameter(torch.randn(width // 2 + 1, 2) * 0.5)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.rfft(x) * self.form(self.weight)
        return torch.tanh(self.linear(x + torch.fft.irfft(filtered, n=self.width)))


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "complex": torch.view_as_complex,
    "conjugate rows": lambda weight: torch.view_as_complex(weight).unsqueeze(0).mH.squeeze(-1),
    "negative part": lambda weight: torch.complex(weight[..., 0], torch.view_as_complex(weight).conj().imag),
    "as parts again": lambda weight: torch.view_as_complex(torch.view_as_real(torch.view_as_complex(weight)) * 2),
}


def prefix_in_a_cache() -> nn.Module:
    """Prefix tuning: learned keys and values go to every layer of a frozen model in a cache."""
    peft = pytest.importorskip("peft")
    options = {"num_virtual_tokens": 4, "prefix_projection": True, "encoder_hidden_size": 8}
    llama = families.make_of_transformers("llama", "LlamaForCausalLM", {})
    model: nn.Module = peft.get_peft_model(llama, peft.PrefixTuningConfig(task_type="CAUSAL_LM", **options))
    return model


Build = Callable[[], nn.Module]
MODELS: dict[str, tuple[Build, list[Batch]]] = {
    "torch encoder": (TorchEncoder, residual.batches(2, (2, 5, WIDTH))),
    "no blocks": (NoBlocks, residual.batches(2, (2, 5, WIDTH))),
    "integers, frozen and spare blocks": (Ordered, residual.batches(2, (4, WIDTH))),
    "views and in-place": (Inplace, residual.batches(2, (4, 6, WIDTH))),
}
# In fp32, as bf16 has no sparse products, and no numbers of two halves.
OTHERS: dict[str, tuple[Build, list[Batch]]] = {
    "looks twice": (partial(awkward.Model, awkward.LooksTwice), awkward.batches(2)),
    "sparse": (partial(awkward.Model, awkward.Sparse), awkward.batches(2)),
    "sparse rows": (partial(awkward.Model, awkward.SparseRows), awkward.batches(2)),
    "sparse weight": (partial(awkward.Model, awkward.SparseWeight), awkward.batches(2)),
    "sparse outside": (awkward.SparseOutside, awkward.batches(2)),
    "nested": (partial(awkward.Model, awkward.Nested), awkward.batches(2)),
    "scaled": (lambda: nn.Sequential(*(Scaled() for _ in range(3))), residual.batches(2, (4, 8))),
    **{f"weight.{view}": (partial(awkward.Model, view=view), awkward.batches(2)) for view in ("mT", "H", "data")},
    "prefix in a cache": (prefix_in_a_cache, families.texts(2)),
    **{
        form: (partial(residual.Model, 32, 3, partial(Spectral, form=FORMS[form])), residual.batches(2))
        for form in FORMS
    },
}
DTYPES = torch.float32, torch.bfloat16


@pytest.mark.parametrize("name", MODELS)
def test_structures(name: str, device: torch.device) -> None:
    """Every structure meets every plan, in the one type or in the other."""
    build, data = MODELS[name]
    dtype = DTYPES[list(MODELS).index(name) % 2]
    check_equal_to_plain(build, data, device=device, dtype=dtype, run=Loop(max_norm=0.5).run)


@pytest.mark.parametrize("name", OTHERS)
def test_structures_of_fp32(name: str, device: torch.device) -> None:
    """Every other structure meets the one half of the plans, and the others the other half."""
    build, data = OTHERS[name]
    check_equal_to_plain(build, data, device=device, specs=FEW_PLANS[list(OTHERS).index(name) % 2 :: 2])


def test_offsets_that_a_block_makes_are_refused_by_profile_and_engine() -> None:
    words = r"blocks\.3 makes the offsets of a nested tensor itself.*pass them to it"
    model: Any = awkward.Model(awkward.OwnOffsets)
    batch = awkward.batches(1)[0]
    with pytest.raises(MisuseError, match=words):
        protrain.wrap(model, adamw(model), example_batch=batch, device="cpu", progress=False)
    for block in model.blocks:
        block.makes = False
    wrapped, _ = wrap_under(Spec("none", "least", "c"), model, adamw(model), batch)
    for block in model.blocks:
        block.makes = True
    with pytest.raises(MisuseError, match=words):
        wrapped(*batch).backward()
