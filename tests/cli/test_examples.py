"""A row becomes the tokens of one example, and the loss counts what the model is to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protrain.cli.codec import Codec, TokenizerCodec
from protrain.cli.examples import ExampleMaker, set_chat_template

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

WORDS = ["<s>", "</s>", "<user>", "<assistant>", "?"]
WORDS += ["hello", "who", "are", "you", "I", "am", "a", "model", "hi", "there"]
# An answer ends with </s>, and the message before an answer with the begin of one.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}> {{ message.content }}"
    "{% if message.role == 'assistant' %} {{ eos_token }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}> {% if message.role == 'assistant' %}"
    "{%- generation %}{{ message.content }}{% endgeneration %} {{ eos_token }}{% else %}{{ message.content }}"
    "{% endif %} {% endfor %}"
)
# It leaves answers before the last message out, as templates do with what a model thought.
FORGETFUL = (
    "{% for message in messages %}{% if loop.last or message.role != 'assistant' %}{{ message.content }} {% endif %}"
    "{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "who are you ?"},
    {"role": "assistant", "content": "I am a model"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi there"},
]


def make_tokenizer(template: str | None = TEMPLATE, *, adds_first: bool = False) -> Any:
    """A tokenizer whose tokens are whole words, which may begin texts with <s>."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if adds_first:
        inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    made.chat_template = template
    return made


def words(row: dict[str, Any], tokenizer: Any, *, column: str | None = None, all_tokens: bool = False) -> list[str]:
    """The tokens of ``row`` as words. Those that the loss counts are in brackets."""
    codec = TokenizerCodec(tokenizer)
    examples = ExampleMaker(codec=codec, column=column, all_tokens=all_tokens)
    ids, counted = examples.maker(row)(row)
    return [f"[{WORDS[token]}]" if count else WORDS[token] for token, count in zip(ids, counted, strict=True)]


def test_the_loss_counts_what_the_assistant_says() -> None:
    expected = (
        "<s> <user> who are you ? <assistant> [I] [am] [a] [model] [</s>] <user> hello <assistant> [hi] [there] [</s>]"
    )
    assert words({"messages": CHAT}, make_tokenizer()) == expected.split()


def test_marks_of_the_template_say_what_is_counted() -> None:
    expected = (
        "<s> <user> who are you ? <assistant> [I] [am] [a] [model] </s> <user> hello <assistant> [hi] [there] </s>"
    )
    assert words({"messages": CHAT}, make_tokenizer(MARKED)) == expected.split()


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_the_loss_may_count_all_tokens(template: str) -> None:
    found = words({"messages": CHAT}, make_tokenizer(template), all_tokens=True)
    assert found == [f"[{word.strip('[]')}]" for word in words({"messages": CHAT}, make_tokenizer(template))]
    assert len(found) == 18


def test_conversations_name_who_speaks_in_another_way() -> None:
    names = {"user": "human", "assistant": "gpt"}
    other = [{"from": names[message["role"]], "value": message["content"]} for message in CHAT]
    assert words({"conversations": other}, make_tokenizer()) == words({"messages": CHAT}, make_tokenizer())
    assert words({"talk": other}, make_tokenizer(), column="talk") == words({"messages": CHAT}, make_tokenizer())


def test_roles_may_have_the_words_of_the_other_way() -> None:
    named = [{**message, "role": {"user": "human", "assistant": "gpt"}[message["role"]]} for message in CHAT]
    assert words({"messages": named}, make_tokenizer()) == words({"messages": CHAT}, make_tokenizer())


def test_fields_that_a_table_left_empty_are_none() -> None:
    template = "{% for message in messages %}{% if message.extra is defined %}there{% endif %} {% endfor %}"
    row = {
        "messages": [{"role": "user", "content": "hi", "extra": None}, {"role": "user", "content": "", "extra": "a"}]
    }
    assert words(row, make_tokenizer(template), all_tokens=True) == ["[there]"]


def test_tools_are_shown_to_the_template() -> None:
    template = "{% for tool in tools %}{{ tool.name }} {% endfor %}" + TEMPLATE
    row = {"messages": CHAT[:2], "tools": [{"name": "hi"}]}
    assert words(row, make_tokenizer(template))[:3] == ["hi", "<s>", "<user>"]


def test_a_template_that_writes_the_date_gives_the_same_tokens_every_day() -> None:
    template = "{% if strftime_now('%Y') == '2024' %}hello{% endif %} " + TEMPLATE
    assert words({"messages": CHAT}, make_tokenizer(template))[:2] == ["hello", "<s>"]


def test_the_loss_counts_the_completion_of_a_prompt() -> None:
    row = {"prompt": "who are", "completion": " you ?"}
    assert words(row, make_tokenizer()) == ["who", "are", "[you]", "[?]", "[</s>]"]
    assert words(row, make_tokenizer(adds_first=True)) == ["<s>", "who", "are", "[you]", "[?]", "[</s>]"]
    assert words(row, make_tokenizer(), all_tokens=True) == ["[who]", "[are]", "[you]", "[?]", "[</s>]"]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_answers_in_a_prompt_are_not_counted(template: str) -> None:
    found = words({"prompt": CHAT[:3], "completion": CHAT[3:]}, make_tokenizer(template))
    asked, answered = "<s> <user> who are you ? <assistant>", "I am a model </s>"
    assert found[:16] == f"{asked} {answered} <user> hello <assistant> [hi]".split()
    assert found[16:] == ["[there]", "[</s>]" if template == TEMPLATE else "</s>"]


def test_an_instruction_is_a_question_of_the_user() -> None:
    row = {"instruction": "who are you ?", "input": "hello", "output": "a model"}
    expected = "<s> <user> who are you ? hello <assistant> [a] [model] [</s>]"
    assert words(row, make_tokenizer()) == expected.split()
    assert words({**row, "input": ""}, make_tokenizer()) == expected.replace(" hello", "").split()


def test_all_of_a_text_counts() -> None:
    row = {"id": "1", "text": "who are you", "other": "hi"}
    assert words(row, make_tokenizer()) == ["[who]", "[are]", "[you]", "[</s>]"]
    assert words(row, make_tokenizer(), column="other") == ["[hi]", "[</s>]"]


def test_bytes_are_counted_where_the_completion_begins() -> None:
    examples = ExampleMaker(codec=Codec(), column=None, all_tokens=False)
    row = {"prompt": "é", "completion": "ß!"}
    ids, counted = examples.maker(row)(row)
    assert bytes(ids.tolist()) == "éß!\0".encode()
    assert counted.tolist() == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"a": "1", "b": "2"}, "none of the columns a, b is text, messages, .* name the one to train on with --column"),
        ({"text": 5}, "column text is no text, but int"),
        ({"messages": "hello"}, "column messages is no list of messages, but str"),
        ({"messages": ["hello"]}, "a message is no object, but str"),
        ({"messages": [{"content": "hello"}]}, "a message has no role"),
        ({"messages": [{"role": "user"}]}, "a message of the user has no content"),
        ({"messages": []}, "the chat template refuses it: "),
        ({"conversations": [{"from": "me", "value": "hi"}]}, "a message is from 'me', which is none of human, user, "),
        ({"prompt": "hello", "completion": None}, "column completion is missing, or null"),
        ({"prompt": [], "completion": "hi"}, "column completion is no list of messages, but str"),
    ],
)
def test_a_row_of_the_wrong_types_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        words(row, make_tokenizer())


def test_what_lacks_a_template_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    with pytest.raises(ValueError, match=r"the tokenizer of --model has none: give --chat-template FILE"):
        words({"messages": CHAT}, tokenizer)
    (tmp_path / "template.jinja").write_text(TEMPLATE, encoding="utf-8-sig")  # as editors on Windows do
    set_chat_template(tokenizer, str(tmp_path / "template.jinja"))
    assert words({"messages": CHAT}, tokenizer) == words({"messages": CHAT}, make_tokenizer())
    with pytest.raises(ValueError, match="--model has no tokenizer: give the folder of a model"):
        ExampleMaker(codec=Codec(), column=None, all_tokens=False).maker({"messages": CHAT})
    with pytest.raises(ValueError, match="--chat-template: --model has no tokenizer"):
        set_chat_template(None, str(tmp_path / "template.jinja"))
    with pytest.raises(ValueError, match=r"--chat-template: cannot read .*nowhere"):
        set_chat_template(tokenizer, str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"--column c: there are only the columns a, b"):
        words({"a": "", "b": ""}, tokenizer, column="c")


def test_a_template_that_rewrites_earlier_answers_needs_marks() -> None:
    with pytest.raises(ValueError, match=r"answer in message 2 cannot be found.*% generation %.*--loss-on all"):
        words({"messages": CHAT}, make_tokenizer(FORGETFUL))
    assert words({"messages": CHAT[:2]}, make_tokenizer(FORGETFUL))[-4:] == ["[I]", "[am]", "[a]", "[model]"]
    assert len(words({"messages": CHAT}, make_tokenizer(FORGETFUL), all_tokens=True)) == 7
