"""What a family is: how its tiny model is built, which batches it trains on, and which loss its users take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

VOCABULARY = 96
Batch: TypeAlias = dict[str, Any]
Draw: TypeAlias = Callable[[torch.Generator], Batch]  # a batch of random values

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **IDS,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, **IDS}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
# of models that say encoder_ and decoder_ for everything, such as BART and DETR
BOTH_SIDES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
SEQUENCES = {
    **BOTH_SIDES,
    **IDS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model returns."""
    loss: Tensor = model(**batch).loss
    return loss


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture in tiny. ``make`` builds equal models for equal states of torch's random generator."""

    name: str
    make: Callable[[], nn.Module]
    draw: Draw
    loss: Callable[[nn.Module, Batch], Tensor] = own_loss

    def batches(self, count: int) -> list[Batch]:
        """Different batches that are the same in every run."""
        generator = torch.Generator().manual_seed(0)
        return [self.draw(generator) for _ in range(count)]


def transformers_family(
    name: str, head: str, draw: Draw, *, unchecked: Mapping[str, Any] | None = None, **config: Any
) -> Family:
    """The family ``name`` of transformers, as the model class or Auto class ``head`` builds it from ``config``.

    ``unchecked`` are settings with a value that the constructor of the config refuses.
    """

    def make() -> nn.Module:
        import transformers

        made = transformers.AutoConfig.for_model(name, **config)
        vars(made).update(unchecked or {})
        model_class: Any = getattr(transformers, head)
        model: nn.Module = model_class.from_config(made) if head.startswith("AutoModel") else model_class(made)
        return model

    return Family(name=name, make=make, draw=draw)


def ids(generator: torch.Generator, length: int = 16) -> Tensor:
    """Two sequences of token numbers. The numbers below 10 are left to special tokens."""
    return torch.randint(10, VOCABULARY, (2, length), generator=generator)


def classes(generator: torch.Generator) -> Tensor:
    """Two classes out of two."""
    return torch.randint(2, (2,), generator=generator)


def pictures(generator: torch.Generator, size: int = 32) -> Tensor:
    """Two pictures."""
    return torch.randn(2, 3, size, size, generator=generator)


def language(generator: torch.Generator) -> Batch:
    """Sequences whose next tokens are to be told."""
    tokens = ids(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded(generator: torch.Generator) -> Batch:
    """A batch of two rows, of which one is shorter and padded."""
    mask = (torch.arange(16) < torch.tensor([[16], [11]])).long()
    tokens = ids(generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def captioned(generator: torch.Generator) -> Batch:
    """Pictures with a text each."""
    return {**language(generator), "pixel_values": pictures(generator)}
