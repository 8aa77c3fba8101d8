"""Rows are packed into sequences, each is seen once in a pass, and no row sees another."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import protrain
from protrain.cli.codec import Codec, TokenizerCodec
from protrain.cli.corpus import tokenize_rows
from protrain.cli.data import (
    Batch,
    Part,
    Tokens,
    check_length,
    counted_in,
    counted_tokens,
    evaluation_batches,
    example_batch,
    stand_in,
    training_batch,
)
from protrain.cli.examples import ExampleMaker
from protrain.cli.main import main
from protrain.cli.models import LoadedModel
from protrain.cli.packing import pack
from protrain.cli.workers import in_order

SEQUENCE = 16


def make_tokens(
    folder: Path,
    rows: list[tuple[str, str]],
    *,
    held_out: float = 0.0,
    sequence: int = SEQUENCE,
    packing: bool = True,
    processes: int = 1,
    codec: Codec | None = None,
) -> Tokens:
    """Pairs of a prompt and a completion, as bytes."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in rows))
    examples = ExampleMaker(codec=codec or Codec(), column=None, all_tokens=False)
    options: dict[str, Any] = {"sequence": sequence, "packing": packing, "processes": processes}
    return tokenize_rows([file], examples, folder / f"data-{processes}", held_out=held_out, **options)


def some_rows(count: int) -> list[tuple[str, str]]:
    generator = np.random.default_rng(0)
    return [
        (f"{number}" + "?" * int(generator.integers(0, 5)), "!" * int(generator.integers(1, 7)))
        for number in range(count)
    ]


def split(batch: Batch) -> list[tuple[str, str]]:
    """The rows in ``batch``, as prompt and completion, by positions and labels."""
    found = []
    for ids, labels, positions in zip(*(batch[name] for name in ("input_ids", "labels", "position_ids")), strict=True):
        starts = [*torch.nonzero(positions == 0)[:, 0].tolist(), len(ids)]
        for first, end in pairwise(starts):
            assert positions[first:end].tolist() == list(range(end - first))
            text, counted = bytes(ids[first:end].tolist()), labels[first:end] != -100
            assert torch.equal(labels[first:end][counted], ids[first:end][counted])
            if counted.any():
                asked = int(counted.int().argmax())
                assert counted[asked:].all(), "all of an answer counts, with the separator"
                assert text.endswith(b"\0")
                found.append((text[:asked].decode(), text[asked:-1].decode()))
            else:
                assert set(text) == {0}, "the rest is padding"
    return found


def batches(tokens: Tokens, steps: int, *, batch: int, micro_batches: int = 1, seed: int = 0) -> list[Batch]:
    options = {"batch": batch, "sequence": SEQUENCE, "micro_batches": micro_batches, "seed": seed}
    return [
        training_batch(tokens, step=step, micro_batch=micro_batch, **options)
        for step in range(steps)
        for micro_batch in range(micro_batches)
    ]


def test_a_row_goes_where_it_leaves_the_least_room() -> None:
    assert pack(np.array([5, 3, 4, 2, 6]), 8).tolist() == [1, 1, 2, 0, 0]
    assert pack(np.array([8, 8]), 8).tolist() == [0, 1]
    assert pack(np.array([], np.int64), 8).tolist() == []


def test_packing_is_best_fit_at_any_size() -> None:
    lengths = np.random.default_rng(0).integers(2, 65, 2000)
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        rooms.remove(min(fitting)) if fitting else None
        rooms.append((min(fitting) if fitting else 64) - length)
    belongs = pack(lengths, 64)
    assert sorted(64 - np.bincount(belongs, weights=lengths)) == sorted(rooms)
    assert lengths.sum() > 0.98 * 64 * len(rooms)


def test_every_row_is_seen_once_in_a_pass(tmp_path: Path) -> None:
    rows = some_rows(60)
    tokens = make_tokens(tmp_path, rows)
    sequences = len(tokens.train) // SEQUENCE
    first, second, other = (
        [split(batch) for batch in drawn]
        for drawn in (
            batches(tokens, sequences, batch=1),
            batches(tokens, 2 * sequences, batch=1)[sequences:],
            batches(tokens, sequences, batch=1, seed=2**64 - 1),
        )
    )
    for drawn in (first, second, other):
        assert sorted(row for one in drawn for row in one) == sorted(rows)
    assert first != second != other
    assert sorted(map(tuple, first)) == sorted(map(tuple, second))


def test_a_step_is_the_same_however_it_is_divided(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path, some_rows(60))
    whole = batches(tokens, 9, batch=4)
    for batch, micro_batches in ((2, 2), (1, 4)):
        parts = batches(tokens, 9, batch=batch, micro_batches=micro_batches)
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(torch.cat([part[name] for part in parts]), torch.cat([part[name] for part in whole]))
        options = {"seed": 0, "batch": batch, "sequence": SEQUENCE, "micro_batches": micro_batches}
        counts = [counted_tokens(tokens, step=step, **options) for step in range(9)]
        assert counts == [counted_in(one) for one in whole]
    assert len(set(counts)) > 1


def test_what_is_longer_than_a_sequence_is_cut(tmp_path: Path) -> None:
    long, short = "abcdefghijklmnopqrstuvwxyz" * 2, "0123456789" * 2
    with pytest.warns(
        UserWarning, match="^--data: 2 of 3 rows are longer than --sequence 16, and are cut into pieces of that length$"
    ):
        tokens = make_tokens(tmp_path, [("", long), (short, "!"), ("a", "b")])
    drawn = batches(tokens, 1, batch=len(tokens.train) // SEQUENCE)[0]
    found = sorted(
        bytes(ids.tolist()) + b"|" + bytes(ids[labels != -100].tolist())
        for ids, labels in zip(drawn["input_ids"], drawn["labels"], strict=True)
    )
    # The first token of a part has nothing before it that belongs to the row. A part of a prompt alone is left out.
    pieces = [long[first : first + 16].encode() for first in (0, 16, 32)]
    rest = b"wxyz\0" + b"6789!\0" + b"ab\0" + b"\0\0|" + b"xyz\0" + b"!\0" + b"b\0"
    assert found == sorted([*(piece + b"|" + piece[1:] for piece in pieces), rest])


def test_a_share_of_the_rows_is_held_out(tmp_path: Path) -> None:
    rows = some_rows(40)
    tokens = make_tokens(tmp_path, rows, held_out=0.1)
    options = {"batch": 2, "sequence": SEQUENCE, "count": 9}
    held_out = [row for batch in evaluation_batches(tokens, **options) for row in split(batch)]
    assert sorted(held_out) == sorted(rows[9::10])
    (drawn,) = batches(tokens, 1, batch=len(tokens.train) // SEQUENCE)
    assert sorted(split(drawn)) == sorted(set(rows) - set(rows[9::10]))
    assert list(evaluation_batches(make_tokens(tmp_path, rows[:9], held_out=0.1), **options)) == []


def test_the_checksum_sees_tokens_and_what_is_counted(tmp_path: Path) -> None:
    first = make_tokens(tmp_path, [("a", "b")])
    assert first.crc32 == make_tokens(tmp_path, [("a", "b")]).crc32
    others = [make_tokens(tmp_path, [("a", "c")]), make_tokens(tmp_path, [("", "ab")], sequence=8)]
    others += [make_tokens(tmp_path, [("aa", "b")]), make_tokens(tmp_path, [("ab", "")])]
    assert len({tokens.crc32 for tokens in (first, *others)}) == 4, "the first token is counted in no row"


def test_entropy_is_that_of_counted_tokens(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path, [("any prompt", "x"), ("other", "x")])
    assert tokens.unigram_entropy == pytest.approx(np.log(2)), "x and the separator"


def test_another_process_maps_the_same_files(tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path, some_rows(20), held_out=0.1)
    again = pickle.loads(pickle.dumps(tokens))
    for part, other in ((tokens.train, again.train), (tokens.held_out, again.held_out)):
        assert np.array_equal(part.tokens, other.tokens)
        assert part.marks is not None
        assert other.marks is not None
        assert np.array_equal(part.marks, other.marks)
    assert (again.crc32, again.unigram_entropy) == (tokens.crc32, tokens.unigram_entropy)
    assert len(pickle.dumps(tokens)) < 2000, "files are named and not copied"
    assert sorted(path.name for path in tokens.folder.iterdir()) == [
        *("held_out.bin", "held_out.marks.bin", "train.bin", "train.marks.bin")
    ]


def test_rows_without_anything_to_learn_are_left_out_or_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match=rf"^--data: {tmp_path}/rows.jsonl holds no rows: it is empty$"):
        make_tokens(tmp_path, [])
    with pytest.raises(
        ValueError, match=r"^--data: no row of .*rows.jsonl has a token that the loss counts, which are .*; --loss"
    ):
        make_tokens(tmp_path, [("", "")])
    with pytest.warns(UserWarning, match="^--data: 1 of 2 rows have no token that the loss counts, and are left out$"):
        tokens = make_tokens(tmp_path, [("", ""), ("a", "b")])
    assert split(batches(tokens, 1, batch=1)[0]) == [("a", "b")]
    with pytest.raises(ValueError, match=r"^--data: .*rows.jsonl, line 2: column completion is no text, but int$"):
        make_tokens(tmp_path, [("a", "b"), ("a", 5)])  # type: ignore[list-item]
    with pytest.warns(UserWarning, match="1 of 2 rows"):
        tokens = make_tokens(tmp_path, [("", ""), ("a", "b")], held_out=0.5)
    with pytest.raises(ValueError, match="0 training tokens, fewer than one sequence of 16"):
        check_length(tokens, sequence=16)


def models() -> dict[str, Callable[[], Any]]:
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 256, "hidden_size": 32, "bos_token_id": None, "eos_token_id": None}
    gpt2 = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
    llama = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **llama)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**size, n_layer=2, n_head=4)),
    }


def unpacked(batch: Batch) -> list[tuple[str, str]]:
    """The row in each sequence of ``batch``, as prompt and completion, by labels."""
    found = []
    assert set(batch) == {"input_ids", "labels"}, "positions are those of any text"
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        counted = [at for at, label in enumerate(labels) if label != -100]
        asked, end = counted[0], counted[-1] + 1
        assert counted == list(range(asked, end)), "all of an answer counts, with the separator"
        assert ids[end - 1 :] == [0] * (len(ids) - end + 1), "the rest is padding"
        found.append((bytes(ids[:asked]).decode(), bytes(ids[asked : end - 1]).decode()))
    return found


def test_without_packing_each_row_has_a_sequence_of_its_own(tmp_path: Path) -> None:
    rows = some_rows(20)
    tokens = make_tokens(tmp_path, rows, held_out=0.25, packing=False)
    seen = [row for batch in batches(tokens, 15, batch=1) for row in unpacked(batch)]
    held_out = [
        row for batch in evaluation_batches(tokens, batch=4, sequence=SEQUENCE, count=9) for row in unpacked(batch)
    ]
    assert len(held_out) == 5
    assert sorted(seen + held_out) == sorted(rows)
    assert seen != [row for row in rows if row not in held_out], "they come in an order of their own"
    sent: Tokens = pickle.loads(pickle.dumps(tokens))
    assert batches(sent, 1, batch=2)[0].keys() == {"input_ids", "labels"}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_no_row_sees_another_where_the_model_takes_positions(name: str, packing: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models()[name]().eval()
    loaded = LoadedModel(
        model=model,
        folder=None,
        weights=None,
        sequence=SEQUENCE,
        learning_rate=0.1,
        codec=Codec(),
    )
    tokens = make_tokens(tmp_path, some_rows(12), packing=packing)
    batch = example_batch(tokens.train, seed=0, batch=2 if packing else 4, sequence=SEQUENCE)
    rows = split(batch) if packing else unpacked(batch)
    assert len(rows) > 2
    together = model(**loaded.arguments(batch)).loss * counted_in(batch)
    alone = torch.zeros(())
    for prompt, answer in rows:
        ids = torch.tensor([list(f"{prompt}{answer}\0".encode())])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        alone += model(input_ids=ids, labels=labels).loss * counted_in({"labels": labels})
    close = together.item() == pytest.approx(alone.item(), rel=1e-5)
    assert close == (name != "bloom" or not packing), "Bloom's forward takes no positions"


def test_a_plan_without_the_rows_is_the_plan_for_them(tmp_path: Path) -> None:
    model = models()["llama"]()
    loaded = LoadedModel(model=model, folder=None, weights=None, sequence=SEQUENCE, learning_rate=0.1, codec=Codec())

    def counted(part: Part) -> protrain.ModelProfile:
        example = loaded.arguments(example_batch(part, seed=0, batch=2, sequence=SEQUENCE))
        return protrain.profile(model, example, device="meta")

    rows, text = counted(make_tokens(tmp_path, some_rows(12)).train), counted(stand_in(SEQUENCE, rows=False))
    assert counted(stand_in(SEQUENCE, rows=True)) == rows
    mask_bytes, positions_bytes = 2 * SEQUENCE * SEQUENCE, 2 * SEQUENCE * 8
    live = [(one.live_bytes, other.live_bytes) for one, other in zip(rows.segments, text.segments, strict=True)]
    between = [one - other for one, other in live[2:-2]]
    assert min(between) >= mask_bytes + positions_bytes, "all blocks share a mask"


@pytest.mark.slow
def test_plan_takes_the_data_of_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    (tmp_path / "text.txt").write_text("a text")
    found = {}
    for name in ("rows.jsonl", "text.txt"):
        command = ["plan", "tiny", "--hardware", "h100", "--no-compile", "--no-chunked-loss", "--json"]
        assert main([*command, "--data", str(tmp_path / name)]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    more = found["rows.jsonl"]["plan"]["device_bytes"] - found["text.txt"]["plan"]["device_bytes"]
    assert more >= 8 * 256 * 256, "a mask"
    assert main([*command, "--data", str(tmp_path / "rows.jsonl"), "--no-packing"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == found["text.txt"]["plan"]
    assert main([*command, "--data", str(tmp_path / "nothing")]) == 2
    assert "--data: " in capsys.readouterr().err


def small_tokenizer() -> Any:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = {word: number for number, word in enumerate(("?", "!", "</s>", *map(str, range(10))))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="?"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "tokenizer"])
def test_several_processes_make_the_same_tokens(kind: str, tmp_path: Path) -> None:
    codec = Codec() if kind == "bytes" else TokenizerCodec(small_tokenizer())
    one, two = (
        make_tokens(tmp_path, some_rows(700), held_out=0.1, processes=processes, codec=codec) for processes in (1, 2)
    )
    assert (two.crc32, two.unigram_entropy) == (one.crc32, one.unigram_entropy)
    for part in ("train.bin", "train.marks.bin", "held_out.bin", "held_out.marks.bin"):
        data = (one.folder / part).read_bytes()
        assert data == (two.folder / part).read_bytes(), part
        assert data


def test_a_wrong_row_is_named_by_several_processes_too(tmp_path: Path) -> None:
    rows: list[Any] = [*some_rows(600), ("a", 5), *some_rows(100)]
    with pytest.raises(ValueError, match=r"^--data: .*rows.jsonl, line 601: column completion is no text, but int$"):
        make_tokens(tmp_path, rows, processes=2)


def test_processes_are_given_no_more_than_they_soon_need() -> None:
    given = 0

    def items() -> Iterator[int]:
        nonlocal given
        for item in range(-20_000, 0):
            given += 1
            yield item

    found = in_order(abs, items(), 2)
    assert next(found) == 20_000
    assert given <= 5 * 256, "two pieces of 256 for each process, and one that is done"
    assert list(found) == list(range(19_999, 0, -1))
