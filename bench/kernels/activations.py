"""What autograd saves of one block, for activation offloading to pack; the blocks do what those of transformers do.

The blocks are written out, so that the suite needs no model library: GPT-2's with its fused projection, dropout and
hand-written GELU, LLaMA's with norms in fp32, rotary embeddings and grouped heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from protrain.cli.shapes import SHAPES, Shape

_BATCH, _SEQUENCE = 4, 1024
_SMALL_BATCH, _SMALL_SEQUENCE, _SMALL_HEADS = 2, 12, 4  # where only correctness is checked
_HEAD = {True: 128, False: 16}  # width of a head, by whether the sizes are whole
_DROPOUT = 0.1


def saved_activations(name: str, device: torch.device, *, whole: bool) -> list[Tensor]:
    """The tensors that autograd saves in the forward of a block of the model ``name``, bf16, without the weights.

    Args:
        name: of a GPT-2, LLaMA or Mistral shape.
        device: where the block runs.
        whole: 4 sequences of 1024 through a block of the model's sizes; else a small block of the same structure.
    """
    shape = SHAPES[name]
    batch, sequence = (_BATCH, _SEQUENCE) if whole else (_SMALL_BATCH, _SMALL_SEQUENCE)
    heads = shape.heads if whole else _SMALL_HEADS
    torch.manual_seed(0)
    with torch.device(device):
        make = _Gpt2Block if shape.family == "gpt2" else _LlamaBlock
        block = make(shape, heads, _HEAD[whole]).to(torch.bfloat16)
        hidden = torch.randn(batch, sequence, heads * _HEAD[whole], dtype=torch.bfloat16, requires_grad=True)
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        # Random states of attention may lie on the host, and weights are no activations.
        if tensor.device.type == device.type and tensor.untyped_storage().data_ptr() not in weights:
            saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden)
    return saved


class _Gpt2Block(nn.Module):
    def __init__(self, shape: Shape, heads: int, head: int) -> None:
        super().__init__()
        hidden = heads * head
        self._heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.c_fc, self.c_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden]
        q, k, v = (
            part.view(*part.shape[:2], self._heads, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.c_proj(attended.transpose(1, 2).reshape(x.shape)))
        wide = self.c_fc(self.ln_2(x))
        inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * torch.pow(wide, 3.0))
        return x + self.dropout(self.c_out(0.5 * wide * (1.0 + torch.tanh(inner))))


class _RmsNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class _LlamaBlock(nn.Module):
    def __init__(self, shape: Shape, heads: int, head: int) -> None:
        super().__init__()
        hidden = heads * head
        mlp = int(hidden * (shape.mlp or 4 * shape.hidden) / shape.hidden)
        narrow = hidden * (shape.kv_heads or shape.heads) // shape.heads
        self._head = head
        self.norm_1, self.norm_2 = _RmsNorm(hidden), _RmsNorm(hidden)
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden]
        normed = self.norm_1(x)
        q, k, v = (
            project(normed).view(*x.shape[:2], -1, self._head).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        cosine, sine = self._rotary(x)
        q, k = (part * cosine + _rotated(part) * sine for part in (q, k))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        normed = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def _rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self._head, 2, device=x.device) / self._head
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), 10000.0**-exponents)
        table = torch.cat([angles, angles], dim=-1)
        return table.cos().to(x.dtype), table.sin().to(x.dtype)


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
