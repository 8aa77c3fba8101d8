"""Turns a row of data into the tokens of one training example, and says which of them the loss counts.

What a row holds follows from its columns: a conversation, a prompt with its completion, or text. A conversation is
written out by the chat template of the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protrain.cli.codec import Codec
from protrain.cli.rows import Row

Example = tuple[NDArray[np.int64], NDArray[np.bool_]]  # the ids, and which of them the loss counts
_Make = Callable[[dict[str, Any]], Example]
# From a row to its messages whose answers do not count, and those that follow.
_Parts = Callable[[dict[str, Any]], tuple[list[Any], list[Any]]]

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ROLES |= {"tool": "tool", "observation": "tool"}
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a template encloses answers in these
_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_DATE = date(2024, 7, 26)  # for templates that write today's, as a run that goes on tomorrow must have the same tokens


@dataclass(frozen=True, kw_only=True)
class ExampleMaker:
    """Makes examples of rows. What it returns can be sent to other processes, which then need not import torch."""

    codec: Codec
    column: str | None  # the column to read, or None to go by the names of columns
    all_tokens: bool  # whether the loss counts all tokens, and not only those of answers

    def maker(self, columns: Mapping[str, Any]) -> _Make:
        """The function that makes an example of a row with the ``columns`` of a first row.

        The function raises a ValueError, which names no row, if one has other types or columns.

        Raises:
            ValueError: None of the columns is known, or the tokenizer has no chat template that a conversation needs.
        """
        if self.column is not None:
            if self.column not in columns:
                raise ValueError(f"--column {self.column}: there are only the columns {', '.join(columns)}")
            is_text = isinstance(columns[self.column], str)
            return partial(self._text, self.column) if is_text else self._chat(partial(_messages, self.column))
        for name in ("messages", "conversations"):
            if name in columns:
                return self._chat(partial(_messages, name))
        if {"prompt", "completion"} <= columns.keys():
            if not isinstance(columns["prompt"], str):
                return self._chat(_prompt)
            return self._completion
        if {"instruction", "output"} <= columns.keys():
            return self._chat(_instruction)
        if "text" in columns:
            return partial(self._text, "text")
        raise ValueError(
            f"none of the columns {', '.join(columns)} is text, messages, conversations, prompt with completion or "
            "instruction with output: name the one to train on with --column, or rename a question and its answer to "
            "prompt and completion"
        )

    def _text(self, column: str, row: dict[str, Any]) -> Example:
        return self._enclosed(_value(row, column, str), 0)

    def _completion(self, row: dict[str, Any]) -> Example:
        prompt = _value(row, "prompt", str)
        return self._enclosed(prompt + _value(row, "completion", str), 0 if self.all_tokens else len(prompt))

    def _enclosed(self, text: str, counted_from: int) -> Example:
        """``text`` from its first to its last token. The loss counts what follows its first characters."""
        codec = self.codec
        ids, counted = codec.encode_spans(text, [(counted_from, len(text))])
        before = [] if codec.first is None else [codec.first]
        after = [] if codec.separator is None else [codec.separator]
        return (
            np.concatenate([before, ids, after]).astype(np.int64),
            np.concatenate([np.zeros(len(before), np.bool_), counted, np.ones(len(after), np.bool_)]),
        )

    def _chat(self, parts: _Parts) -> _Make:
        """A maker of conversations, whose messages ``parts`` finds in a row."""
        if self.codec.tokenizer is None:
            raise ValueError(
                "conversations need a tokenizer with a chat template, and --model has no tokenizer: give the folder of "
                "a model that has one"
            )
        if self.codec.tokenizer.chat_template is None:
            raise ValueError(
                "conversations need a chat template, and the tokenizer of --model has none: give --chat-template FILE"
            )
        return partial(self._conversation, parts)

    def _conversation(self, parts: _Parts, row: dict[str, Any]) -> Example:
        given, following = parts(row)
        messages = [_message(message) for message in (*given, *following)]
        tools = row.get("tools") if isinstance(row.get("tools"), list) else None
        if not self.all_tokens and _MARKS.search(self._template(tools)):
            found = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
            counted = np.array(found["assistant_masks"], np.bool_)
            if given:
                asked = self._apply(messages[: len(given)], tools, tokenize=False)
                counted[: len(self.codec.encode(asked.encode()))] = False
            return self.codec.checked(found["input_ids"]), counted
        text = self._apply(messages, tools, tokenize=False)
        spans = [(0, len(text))] if self.all_tokens else self._answers(text, messages, len(given), tools)
        return self.codec.encode_spans(text, spans)

    def _answers(self, text: str, messages: list[dict[str, Any]], first: int, tools: Any) -> list[tuple[int, int]]:
        """The spans in ``text`` of answers from message ``first`` on.

        An answer is what its message adds to the messages before it and the begin of an answer.
        """
        spans = []
        for number, message in enumerate(messages):
            if number < first or message["role"] != "assistant":
                continue
            before = self._apply(messages[:number], tools, tokenize=False, add_generation_prompt=True) if number else ""
            until = self._apply(messages[: number + 1], tools, tokenize=False)
            if not (text.startswith(until) and until.startswith(before)):
                raise ValueError(
                    f"the answer in message {number + 1} cannot be found, as the chat template writes it otherwise "
                    "when more follows: give --chat-template FILE with {% generation %} and {% endgeneration %} around "
                    "answers (TRL has such files, trl/chat_templates/*_training.jinja), or --loss-on all"
                )
            spans.append((len(before), len(until)))
        return spans

    def _template(self, tools: Any) -> str:
        """The template for conversations with or without ``tools``, with a fixed date."""
        return _dated(self.codec.tokenizer.get_chat_template(tools=tools))

    def _apply(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
        try:
            template = self._template(tools)
            return self.codec.tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, **options)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template refuses it: {error}") from None


def example_of(make: _Make, row: Row) -> tuple[Example, float]:
    """The example that ``make`` makes of ``row``, and the share of the file read with it. Errors name the row."""
    try:
        return make(row.values), row.share
    except ValueError as error:
        raise ValueError(f"--data: {row.place}: {error}") from None


@lru_cache(maxsize=4)
def _dated(template: str) -> str:
    return _TODAY.sub(lambda call: repr(_DATE.strftime(call[2])), template)


def set_chat_template(tokenizer: Any, file: str) -> None:
    """Give ``tokenizer`` the chat template in ``file``. The trained model is saved with it."""
    if tokenizer is None:
        raise ValueError("--chat-template: --model has no tokenizer to use it")
    try:
        tokenizer.chat_template = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template: cannot read {file}: {error}") from None


def _value(row: dict[str, Any], column: str, kind: type) -> Any:
    value = row.get(column)
    if not isinstance(value, kind):
        expected = "text" if kind is str else "list of messages"
        found = "missing, or null" if value is None else f"no {expected}, but {type(value).__name__}"
        raise ValueError(f"column {column} is {found}")
    return value


def _message(message: Any) -> dict[str, Any]:
    """``message`` with role and content, without the empty fields that tables add."""
    if not isinstance(message, dict):
        raise ValueError(f"a message is no object, but {type(message).__name__}")
    if "from" in message:
        role = _ROLES.get(message["from"])
        if role is None:
            raise ValueError(f"a message is from {message['from']!r}, which is none of {', '.join(_ROLES)}")
        message = {"role": role, "content": message.get("value")}
    message = {name: value for name, value in message.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise ValueError("a message has no role")
    if message["role"] in ("human", "gpt"):  # the words of "from", which people also write with "role"
        message["role"] = _ROLES[message["role"]]
    if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
        raise ValueError(f"a message of the {message['role']} has no content")
    return message


def _messages(column: str, row: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    return [], _value(row, column, list)


def _prompt(row: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    return _value(row, "prompt", list), _value(row, "completion", list)


def _instruction(row: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The question and the answer in a row of instruction, output and perhaps input."""
    asked = "\n\n".join(part for part in (_value(row, "instruction", str), row.get("input")) if part)
    return [{"role": "user", "content": asked}], [{"role": "assistant", "content": _value(row, "output", str)}]
