"""Random batches for tiny families: texts, pictures with labels and texts, sounds and series of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

VOCABULARY = 96
IMAGE = 3  # the token that stands for a part of a picture
Batch: TypeAlias = dict[str, Any]
Draw: TypeAlias = Callable[[torch.Generator], Batch]


def ids(generator: torch.Generator, length: int = 16) -> Tensor:
    """Two sequences of token numbers. The numbers below 10 are left to special tokens."""
    return torch.randint(10, VOCABULARY, (2, length), generator=generator)


def language(generator: torch.Generator) -> Batch:
    """Sequences whose next tokens are to be told."""
    tokens = ids(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded(generator: torch.Generator) -> Batch:
    """Sequences of which one is shorter and padded, which takes other paths in attention."""
    mask = (torch.arange(16) < torch.tensor([[16], [11]])).long()
    tokens = ids(generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def translated(g: torch.Generator) -> Batch:
    return {"input_ids": ids(g), "labels": ids(g, 8)}


def pictures(generator: torch.Generator, size: int = 32) -> Batch:
    """Two pictures."""
    return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}


def labelled(g: torch.Generator) -> Batch:
    return {**pictures(g), "labels": torch.randint(2, (2,), generator=g)}


def boxed(g: torch.Generator) -> Batch:
    def boxes(count: int) -> Batch:
        places = torch.rand(count, 4, generator=g) * 0.4 + 0.3
        return {"class_labels": torch.randint(3, (count,), generator=g), "boxes": places}

    return {**pictures(g, 64), "labels": [boxes(2), boxes(3)]}


def masked(g: torch.Generator) -> Batch:
    masks = [torch.randint(2, (count, 64, 64), generator=g).float() for count in (2, 3)]
    labels = [torch.randint(3, (count,), generator=g) for count in (2, 3)]
    return {**pictures(g, 64), "mask_labels": masks, "class_labels": labels}


def shown(g: torch.Generator, *, parts: int = 4) -> Batch:
    """Sequences with places for the parts of one picture each; the loss leaves those out."""
    tokens = ids(g, 24)
    tokens[:, 1 : 1 + parts] = IMAGE
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels, **pictures(g)}


def shown_in_lists(g: torch.Generator) -> Batch:
    batch = shown(g)
    return {**batch, "pixel_values": batch["pixel_values"][:, None]}


def shown_as_patches(g: torch.Generator) -> Batch:
    batch = shown(g)
    batch["input_ids"][:, 0], batch["input_ids"][:, 5] = 4, 5  # begin and end of the picture
    return {
        **batch,
        "pixel_values": torch.randn(2 * 16, 3 * 2 * 8 * 8, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).long(),
    }


def shown_as_tiles(g: torch.Generator) -> Batch:
    one = torch.ones(2, 1, dtype=torch.long)
    masks = {"aspect_ratio_mask": one[:, :, None], "cross_attention_mask": one[:, :, None, None].expand(-1, 16, -1, -1)}
    return {**language(g), "pixel_values": pictures(g)["pixel_values"][:, None, None], "aspect_ratio_ids": one, **masks}


def paired(g: torch.Generator) -> Batch:
    tokens = ids(g)
    tokens[:, -1] = 2
    return {"input_ids": tokens, **pictures(g), "return_loss": True}


def spoken(g: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=g), "labels": ids(g, 10)}


def waves(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 800, generator=g), "labels": ids(g, 5)}


def forecast(g: torch.Generator) -> Batch:
    past, future = torch.randn(2, 10, generator=g), torch.randn(2, 4, generator=g)
    times = {"past_time_features": past[..., None].tanh(), "future_time_features": future[..., None].tanh()}
    return {"past_values": past, "past_observed_mask": torch.ones(2, 10), "future_values": future, **times}
