"""Text becomes tokens, and tokens become batches that depend only on seed and step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from protrain.cli.codec import Codec, TokenizerCodec
from protrain.cli.data import Tokens, check_length, evaluation_batches, training_batch
from protrain.cli.text import tokenize


def make_tokens(folder: Path, text: str, held_out: float = 0.1) -> Tokens:
    source = folder / "text.txt"
    source.write_text(text)
    return tokenize([source], Codec(), folder / "data", held_out=held_out)


def words_codec() -> Codec:
    """A codec with a tokenizer that knows two words."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel({"<unk>": 0, "to": 1, "be": 2, "</s>": 70000}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return TokenizerCodec(transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))


def test_bytes_split_at_the_tail_of_every_document(tmp_path: Path) -> None:
    for name, text in (("a.txt", "a" * 100), ("b.txt", "é" * 50), ("empty.txt", "")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    seen: list[int] = []
    tokens = tokenize(sorted(tmp_path.glob("*.txt")), Codec(), tmp_path / "data", held_out=0.1, progress=seen.append)
    assert tokens.train.tokens.tobytes() == np.array([97] * 91 + [0xC3, 0xA9] * 45 + [0xC3], np.uint16).tobytes()
    assert tokens.held_out.tokens.tolist() == [97] * 9 + [0] + [0xA9, *[0xC3, 0xA9] * 4, 0]
    assert sum(seen) == 200
    assert Codec().decode(tokens.held_out.tokens[:12].tolist()).startswith("a" * 9)


def test_the_byte_order_mark_of_a_file_is_no_text(tmp_path: Path) -> None:
    for name, text in (("a.txt", "to be"), ("b.txt", "\ufeffbe"), ("c.txt", "")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    paths = sorted(tmp_path.glob("*.txt"))
    bytes_of_all = tokenize(paths, Codec(), tmp_path / "bytes", held_out=0.0).train.tokens
    assert bytes_of_all.tolist() == [*b"to be", 0, *"\ufeffbe".encode(), 0]  # a second mark is a character
    codec = words_codec()
    assert tokenize(paths[:1], codec, tmp_path / "words", held_out=0.0).train.tokens.tolist() == [1, 2, 70000]
    with pytest.raises(ValueError, match=r"c\.txt holds no text"):
        tokenize(paths[2:], Codec(), tmp_path / "none", held_out=0.0)


def test_unigram_entropy_is_that_of_all_tokens(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path, "ab" * 500, held_out=0.5)
    share = np.array([500, 500]) / 1000
    assert tokens.unigram_entropy == pytest.approx(-(share * np.log(share)).sum())
    assert tokens.unigram_entropy == pytest.approx(math.log(2))


def test_a_checksum_sees_one_changed_letter(tmp_path: Path) -> None:
    first = make_tokens(tmp_path, "the same text" * 10).crc32
    assert make_tokens(tmp_path, "the same text" * 10).crc32 == first
    assert make_tokens(tmp_path, "the same tezt" * 10).crc32 != first


def test_a_tokenizer_gives_the_tokens_and_the_separator(tmp_path: Path) -> None:
    codec = words_codec()
    source = tmp_path / "text.txt"
    source.write_text("to be or\n")
    tokens = tokenize([source], codec, tmp_path / "data", held_out=0.0)
    assert tokens.train.tokens.tolist() == [1, 2, 0, 70000]
    assert codec.decode([1, 2]) == "to be"


def test_batches_are_drawn_from_seed_and_step_alone(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path, "".join(chr(32 + i % 90) for i in range(5000)))

    def draw(seed: int = 0, step: int = 3, micro_batch: int = 0) -> torch.Tensor:
        drawn = training_batch(tokens, seed=seed, step=step, micro_batch=micro_batch, batch=4, sequence=16)
        assert torch.equal(drawn["input_ids"], drawn["labels"])
        return drawn["input_ids"]

    assert draw().shape == (4, 16)
    assert draw().dtype == torch.int64
    assert torch.equal(draw(), draw())
    others = [draw(seed=1), draw(step=4), draw(micro_batch=1)]
    assert not any(torch.equal(draw(), other) for other in others)
    stream = tokens.train.tokens.tolist()
    for row in draw().tolist():
        assert any(stream[start : start + 16] == row for start in range(len(stream))), "a stretch of the training part"


def test_every_window_can_be_drawn_also_the_last(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path, "0123456789", held_out=0.0)
    assert len(tokens.train) == 11, "the document and its separator"
    starts = {
        int(training_batch(tokens, seed=0, step=step, micro_batch=0, batch=1, sequence=10)["input_ids"][0, 0])
        for step in range(20)
    }
    assert starts == {ord("0"), ord("1")}


def test_evaluation_windows_do_not_overlap_and_stay_in_the_held_out_part(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path, "".join(chr(32 + i % 90) for i in range(2000)), held_out=0.2)
    batches = [found["input_ids"] for found in evaluation_batches(tokens, batch=3, sequence=16, count=2)]
    assert [len(batch) for batch in batches] == [3, 3]
    whole = [row.tolist() for row in torch.cat(batches)]
    held_out = tokens.held_out.tokens.tolist()
    cut = [held_out[start : start + 16] for start in range(0, len(held_out) - 15, 16)]
    assert [cut.index(row) for row in whole] == sorted(cut.index(row) for row in whole)
    assert whole[0] == cut[0]
    assert whole[-1] == cut[-1]
    assert list(evaluation_batches(make_tokens(tmp_path, "abc", held_out=0.0), batch=3, sequence=16, count=2)) == []


@pytest.fixture
def latin1(tmp_path: Path) -> Path:
    """A folder with one file in UTF-8 and one in another encoding."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("to bé or\n", encoding="utf-8")
    (folder / "b.txt").write_text("to be or\nnot to bé\n", encoding="latin1")
    return folder


def test_bytes_are_tokens_in_any_encoding(latin1: Path, tmp_path: Path) -> None:
    tokens = tokenize(sorted(latin1.iterdir()), Codec(), tmp_path / "data", held_out=0.0)
    assert bytes(tokens.train.tokens.tolist()) == "to bé or\n\0".encode() + "to be or\nnot to bé\n\0".encode("latin1")


def test_a_tokenizer_is_given_no_other_encoding(latin1: Path, tmp_path: Path) -> None:
    codec, data = words_codec(), tmp_path / "data"
    with pytest.raises(ValueError, match=r"--data: .*b.txt is no UTF-8 text: line 2 has byte 0xe9 at offset 17 of"):
        tokenize(sorted(latin1.iterdir()), codec, data, held_out=0.0)
    (latin1 / "c.txt").write_bytes(b"to be or\xff")
    with pytest.raises(ValueError, match=r"2 of 3 files are no UTF-8 text, the first .*b.txt: .*`iconv -f"):
        tokenize(sorted(latin1.iterdir()), codec, data, held_out=0.0)
    assert not data.exists(), "found out before anything is written"


def test_tokens_beyond_bytes_are_no_text() -> None:
    assert Codec().decode([0, 72, 105, 256, 50256, 33]) == "Hi!"


def test_data_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"text.txt holds no text: it is empty"):
        make_tokens(tmp_path, "")
    with pytest.raises(ValueError, match="10 training tokens, fewer than one sequence of 16"):
        check_length(make_tokens(tmp_path, "123456789", held_out=0.0), sequence=16)


@pytest.mark.parametrize("character", ["a", "é", "語", "🦊"])
def test_a_line_of_any_length_is_read_in_pieces_that_cut_no_character(character: str, tmp_path: Path) -> None:
    text = f"x{character * 1_000_000} {'word ' * 100_000}"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    pieces: list[bytes] = []

    class Collecting(Codec):
        def encode(self, text: bytes) -> NDArray[np.uint8]:
            pieces.append(text)
            return np.ones(1, np.uint8)

    tokenize([tmp_path / "text.txt"], Collecting(), tmp_path / "data", held_out=0.0)
    assert max(map(len, pieces)) <= 512 * 1024
    assert "".join(piece.decode() for piece in pieces) == text
    assert pieces[-1].startswith(b" word"), "words are not cut"
