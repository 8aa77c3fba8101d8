"""Blocks are found by structure, in models that are built in all the usual ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from protrain.profiler.blocks import find_blocks, find_units


class _Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class _Other(_Block):
    pass


class _Holder(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def _list(n: int) -> nn.ModuleList:
    return nn.ModuleList([_Block() for _ in range(n)])


SHARED = _Block()
CASES: dict[str, tuple[nn.Module, list[str]]] = {
    "list": (_Holder(embed=nn.Embedding(3, 4), layers=_list(2)), ["layers.0", "layers.1"]),
    "encoder and decoder": (
        _Holder(encoder=_Holder(layers=_list(2)), decoder=_Holder(layers=_list(2))),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
    ),
    "nanoGPT's ModuleDict": (
        nn.ModuleDict({"wte": nn.Embedding(300, 4), "wpe": nn.Embedding(300, 4), "h": _list(2)}),
        ["h.0", "h.1"],
    ),
    "head of Linears": (
        _Holder(layers=_list(2), head=nn.Sequential(nn.Linear(4, 99), nn.ReLU(), nn.Linear(99, 4))),
        ["layers.0", "layers.1"],
    ),
    "Linears around blocks": (
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(_Block(), _Block()), nn.Linear(4, 4)),
        ["1.0", "1.1"],
    ),
    "plain Sequential": (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),
    "stages of blocks": (
        _Holder(
            stem=nn.Conv2d(3, 4, 1), layer1=nn.Sequential(_Block(), _Block()), layer2=nn.Sequential(_Block(), _Block())
        ),
        ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    ),
    "list of lists": (nn.ModuleList([_list(2), _list(2)]), ["0.0", "0.1", "1.0", "1.1"]),
    "odd layer": (_Holder(layers=nn.ModuleList([_Other(), _Block(), _Block()])), ["layers.0", "layers.1", "layers.2"]),
    "experts inside": (
        _Holder(layers=nn.ModuleList([_Holder(experts=_list(3)), _Holder(experts=_list(3))])),
        ["layers.0", "layers.1"],
    ),
    "numbered siblings": (_Holder(block1=_Block(), block2=_Block(), head=nn.Linear(4, 4)), ["block1", "block2"]),
    "one layer": (_Holder(embed=nn.Embedding(3, 4), layers=_list(1)), ["layers.0"]),
    "one layer many times": (nn.ModuleList([SHARED, SHARED, SHARED]), ["0"]),
    "none": (_Holder(first=nn.Linear(4, 4), second=_Block()), []),
    "leaf": (nn.Linear(4, 4), []),
    "torch's encoder": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False),
        ["layers.0", "layers.1"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks(case: str) -> None:
    model, expected = CASES[case]
    assert find_blocks(model) == expected


def test_units_are_blocks_and_outer_owners(tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("gpt2")
    units = find_units(model, find_blocks(model))
    assert list(units) == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.h.2",
        "transformer.ln_f",
        "lm_head",
    ]
    inner = model.get_submodule("transformer.h.1")
    assert [id(parameter) for parameter in units["transformer.h.1"]] == list(map(id, inner.parameters()))
    alone = nn.Linear(2, 2)
    [(path, owned)] = find_units(alone, []).items()
    assert (path, list(map(id, owned))) == ("", [id(alone.weight), id(alone.bias)])
