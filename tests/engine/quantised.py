"""Frozen weights that are no plain numbers, as adapters train beside them, in small classes made by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

WIDTH = 32


class Scaled(Tensor):
    """A tensor made of 8-bit numbers and a scale, with no memory of its own, as those of torchao are."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Scaled:
        make: Any = Tensor._make_wrapper_subclass
        made: Scaled = make(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)
        made.numbers, made.scale = numbers, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Scaled:
        return Scaled(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            kwargs.pop("dtype", None)
            return Scaled(func(args[0].numbers, **kwargs), func(args[0].scale, **kwargs))
        args, kwargs = tree_map(lambda leaf: plain(leaf) if isinstance(leaf, Scaled) else leaf, (args, kwargs))
        return func(*args, **kwargs)


def plain(weight: Scaled) -> Tensor:
    return weight.numbers.to(weight.scale.dtype) * weight.scale


def quantised() -> tuple[Tensor, Tensor]:
    weight = torch.randn(WIDTH, WIDTH) * 0.2
    scale = weight.abs().max() / 127
    return (weight / scale).round().to(torch.int8), scale


class Int8(nn.Module):
    """The scale is an attribute of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        numbers, scale = quantised()
        weight: Any = nn.Parameter(numbers, requires_grad=False)
        weight.scale = scale
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = vars(self.weight)["scale"]
        return x @ (self.weight.to(x.dtype) * scale).t()


class Float64(nn.Module):
    """Multiplies in float64, which the cast to the type of the other weights would round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) * 0.2, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() @ self.weight.t()).to(x.dtype)


class Fp8(nn.Module):
    """Tells by the bytes of an element whether its weight is quantised, as layers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        numbers, scale = quantised()
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.weight = nn.Parameter(numbers.to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.element_size() > 1:
            return x @ self.weight.t()
        return x @ (self.weight.to(x.dtype) * self.scale).t()


class OwnClass(nn.Module):
    """A tensor of another class, which autograd saves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Scaled(*quantised()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Block(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(WIDTH), base
        self.down = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        self.up = nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + torch.tanh(self.base(h) + h @ self.down.t() @ self.up.t())


class Adapted(nn.Module):
    """Blocks with adapters beside layers that ``make`` makes, of WIDTH inputs and outputs."""

    def __init__(self, make: Any, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.enter = nn.Linear(8, WIDTH)
            self.blocks = nn.ModuleList(Block(make()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x
