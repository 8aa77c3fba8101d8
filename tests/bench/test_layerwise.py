"""What hooks on layers see of a step's memory, what they miss, and that our prediction misses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench.planner import layerwise

KIB = 1024


def _takes_much(x: Tensor) -> Tensor:
    """0, by way of a tensor 64 times as large as ``x``."""
    return x.detach().repeat(1, 64).sum() * 0


class _Between(nn.Module):
    """Between its two layers, and in no hook's sight, something is as large as all else together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(x + _takes_much(x))


class _Inside(nn.Module):
    """The same inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + _takes_much(x)


class _Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("kind", "seen"), [(_Between, False), (_Inside, True)])
def test_what_lies_between_layers_is_missed(kind: type[nn.Module], seen: bool, recompute: bool) -> None:
    x = torch.randn(16, 16, requires_grad=True)  # 1 KiB; what is repeated takes 64
    view = layerwise.view_step(_Model(kind), {"x": x}, recompute=recompute)
    assert view.ends_bytes < 16 * KIB
    assert view.true_bytes > 64 * KIB
    assert (view.in_layers_bytes == view.true_bytes) is seen


def test_the_command_compares_both_with_our_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert layerwise.main(["--model", "tiny", "--batch", "4", "--sequence", "64", "--out", str(tmp_path)]) == 0
    result = layerwise.Table.load(tmp_path / layerwise.FILE)
    assert [row.mode for row in result.modes] == ["recomputed", "kept"]
    for row in result.modes:
        assert row.ends_bytes < row.true_bytes
        # Hooks keep a little; a plain step drops every gradient as it comes, and the engine has a block's together.
        assert 0.98 * row.true_bytes <= row.ours_bytes < 1.1 * row.true_bytes
    assert "missed at layers' ends" in capsys.readouterr().out
