"""`protrain plan` of a model whose weights are held in 4 bits."""

from __future__ import annotations

import json

import pytest

from protrain.cli.main import main

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


@pytest.mark.slow
def test_a_plan_counts_4bit_weights(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "gpt2", "--hardware", "h100", "--batch", "1", "--sequence", "8", "--no-compile"]
    sizes = {}
    for way in ((), ("--load-in-4bit",)):
        assert main([*plan, "--no-chunked-loss", "--lora", "r=16", "--json", *way]) == 0
        sizes[way] = json.loads(capsys.readouterr().out)["plan"]["device_bytes"]
    quantised = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    saved_bytes = quantised * (2 - 0.5 - 1 / 64 - 4 / 64 / 256)
    at_work_bytes = 2 * 2 * 768 * 3072  # a product takes its weight in 16 bits, and transposed
    assert sizes[()] - sizes["--load-in-4bit",] == pytest.approx(saved_bytes - at_work_bytes, rel=0.02)
    assert main([*plan, "--no-chunked-loss", "--lora", "r=16", "--load-in-4bit"]) == 0
    assert "and 41.8 MiB of 4-bit weights" in " ".join(capsys.readouterr().out.split())


def test_4bit_weights_need_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--hardware", "h100", "--load-in-4bit"]) == 2
    assert "add an adapter to train, like --lora r=16" in capsys.readouterr().err
