"""Codecs: text to token ids and back, with a tokenizer or by bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

Spans = Sequence[tuple[int, int]]  # stretches of a text, as the first character and the one after the last


class Codec:
    """Converts text to token ids and back. Tokens are bytes, of which byte 0 is in no text and separates documents."""

    tokenizer: Any = None  # of transformers; None if tokens are bytes
    first: int | None = None  # the token with which the tokenizer begins a text, if it does
    separator: int | None = 0  # the token after every document
    vocabulary: int = 256  # all token ids are smaller
    needed: int = 256  # embeddings that a model must have; text may be without the tokens that were added later
    embeddings: int | None = None  # that the model has; None if it has one for every token

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of ids on the disk."""
        return np.dtype(np.uint16 if self.vocabulary <= 2**16 else np.uint32)

    def encode(self, text: bytes) -> NDArray[np.uint8] | NDArray[np.int64]:
        """The ids of UTF-8 text."""
        return np.frombuffer(text, np.uint8)

    def encode_spans(self, text: str, spans: Spans) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The ids of ``text``, and which of them overlap one of the ``spans``, which the loss counts."""
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        counted = np.zeros(len(ids), np.bool_)
        for first, end in spans:
            counted[len(text[:first].encode()) : len(text[:end].encode())] = True
        return ids, counted

    def checked(self, ids: list[int]) -> NDArray[np.int64]:
        """``ids`` of the tokenizer. ValueError if the model has no embedding for one of them."""
        array = np.array(ids, np.int64)
        if self.embeddings is not None and array.max(initial=0) >= self.embeddings:
            wrong = int(array[array >= self.embeddings][0])
            raise ValueError(
                f"token {wrong} ({self.tokenizer.convert_ids_to_tokens(wrong)!r}) has no embedding, as --model has "
                f"{self.embeddings}: take it out of the data, or save the model anew after "
                f"model.resize_token_embeddings({self.vocabulary}), which then learns it"
            )
        return array

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``, without those of a model that stand for no text."""
        return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")


class TokenizerCodec(Codec):
    """The codec of a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.first = tokenizer.bos_token_id if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else None
        self.separator = tokenizer.eos_token_id
        ids, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
        always = (number for number in (self.first, self.separator) if number is not None)
        self.vocabulary = 1 + max(ids.values())
        self.needed = 1 + max((*always, *(number for token, number in ids.items() if token not in added)))

    @override
    def encode(self, text: bytes) -> NDArray[np.int64]:
        return self.checked(self.tokenizer(text.decode(), add_special_tokens=False, verbose=False)["input_ids"])

    @override
    def encode_spans(self, text: str, spans: Spans) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        whole = all(span == (0, len(text)) for span in spans)
        if not whole and not self.tokenizer.is_fast:
            raise ValueError(
                f"{type(self.tokenizer).__name__} does not say which characters a token stands for, so answers cannot "
                "be told from questions: give --loss-on all"
            )
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=not whole, verbose=False)
        ids = self.checked(found["input_ids"])
        if whole:
            return ids, np.full(len(ids), bool(spans))
        counted = np.zeros(len(ids), np.bool_)
        begins, ends = np.array(found["offset_mapping"], np.int64).reshape(-1, 2).T
        for first, end in spans:
            counted |= (begins < end) & (ends > first)
        return ids, counted

    @override
    def decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text
