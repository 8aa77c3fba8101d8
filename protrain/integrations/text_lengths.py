"""How long texts and conversations are, in the tokens of a trainer's own tokenizer.

Characters would not do. A text of fewer characters is often the one of more tokens: in another script, of rare words or
of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase


def is_conversation(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether ``value`` is a list of messages with nothing in them but text and numbers."""
    plain = str | int | float | None
    return all(isinstance(each, Mapping) for each in value) and all(isinstance(leaf, plain) for leaf in _leaves(value))


class TextLengths:
    """Measures texts and conversations.

    A conversation is as long as what the chat template makes of it, or as its texts where there is no template or the
    template does not take it. Where no tokenizer is known, characters are counted, and ``guessed`` becomes true.

    Args:
        sources: of which the first that is or has a tokenizer counts: a processing class, a collator.
        chat_template: in place of the tokenizer's own.
    """

    def __init__(self, *sources: Any, chat_template: str | None = None) -> None:
        self.guessed = False
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._template = chat_template
        for source in sources:
            tokenizer = getattr(source, "tokenizer", source)
            if isinstance(tokenizer, PreTrainedTokenizerBase):
                self._tokenizer = tokenizer
                self._template = chat_template or getattr(source, "chat_template", None) or tokenizer.chat_template
                break

    def of(self, values: list[Any]) -> np.ndarray:
        """The length of each of ``values``, which are texts or conversations, or None, whose length is 0."""
        lengths = np.zeros(len(values), np.int64)
        places = [at for at, value in enumerate(values) if value]
        lengths[places] = self._count([self._text_of(values[at]) for at in places])
        return lengths

    def _text_of(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if self._tokenizer is not None and self._template:
            # Templates raise what they like, such as for two messages of one role in succession.
            with suppress(Exception):
                return str(self._tokenizer.apply_chat_template(value, chat_template=self._template, tokenize=False))
        return "\n".join(leaf for leaf in _leaves(value) if isinstance(leaf, str))

    def _count(self, texts: list[str]) -> list[int]:
        if self._tokenizer is None:
            self.guessed = self.guessed or bool(texts)
            return [len(text) for text in texts]
        if not texts:
            return []
        found = self._tokenizer(texts, return_attention_mask=False, truncation=False, verbose=False)
        return [len(ids) for ids in found["input_ids"]]


def _leaves(value: Any) -> Iterator[Any]:
    if not isinstance(value, Mapping | list | tuple):
        yield value
        return
    for each in value.values() if isinstance(value, Mapping) else value:
        yield from _leaves(each)
