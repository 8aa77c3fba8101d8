"""Codecs: text to token ids and back, with a tokenizer or by bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Spans = Sequence[tuple[int, int]]  # stretches of a text, as the first character and the one after the last


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Converts text to token ids and back."""

    encode: Callable[[bytes], list[int] | NDArray[np.uint8]]  # takes UTF-8 text
    # Takes a text and the spans of it that the loss counts. Returns its ids, and which of them overlap a span.
    encode_spans: Callable[[str, Spans], tuple[NDArray[np.int64], NDArray[np.bool_]]]
    decode: Callable[[list[int]], str]
    first: int | None  # the token with which the tokenizer begins a text, if it does
    separator: int | None  # the token after every document
    vocabulary: int  # all token ids are smaller
    tokenizer: Any = None  # of transformers; None if tokens are bytes

    def __reduce__(self) -> Any:
        return (byte_codec, ()) if self.tokenizer is None else (tokenizer_codec, (self.tokenizer,))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of ids on the disk."""
        return np.dtype(np.uint16 if self.vocabulary <= 2**16 else np.uint32)


def byte_codec() -> Codec:
    """A codec with bytes as tokens. Byte 0, which text does not contain, separates documents.

    Other tokens of a model are no text and are left out in decoding.
    """

    def encode_spans(text: str, spans: Spans) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        counted = np.zeros(len(ids), np.bool_)
        for first, end in spans:
            counted[len(text[:first].encode()) : len(text[:end].encode())] = True
        return ids, counted

    return Codec(
        encode=lambda text: np.frombuffer(text, np.uint8),
        encode_spans=encode_spans,
        decode=lambda tokens: bytes(token for token in tokens if 0 < token < 256).decode(errors="replace"),
        first=None,
        separator=0,
        vocabulary=256,
    )


def tokenizer_codec(tokenizer: Any) -> Codec:
    """The codec of a transformers tokenizer."""

    def encode_spans(text: str, spans: Spans) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        whole = all(span == (0, len(text)) for span in spans)
        if not whole and not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say which characters a token stands for, so answers cannot be "
                "told from questions: give --loss-on all"
            )
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=not whole, verbose=False)
        ids = np.array(found["input_ids"], np.int64)
        if whole:
            return ids, np.full(len(ids), bool(spans))
        counted = np.zeros(len(ids), np.bool_)
        begins, ends = np.array(found["offset_mapping"], np.int64).reshape(-1, 2).T
        for first, end in spans:
            counted |= (begins < end) & (ends > first)
        return ids, counted

    return Codec(
        encode=lambda text: tokenizer(text.decode(), add_special_tokens=False, verbose=False)["input_ids"],
        encode_spans=encode_spans,
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        first=tokenizer.bos_token_id if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else None,
        separator=tokenizer.eos_token_id,
        vocabulary=len(tokenizer),
        tokenizer=tokenizer,
    )
