"""``bench.train --host-rate``: contestants beside a load on the host's DRAM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.dram_load import Load
from bench.train.__main__ import main
from bench.train.contestants import Contestant
from bench.train.results import Comparison, Outcome


def test_every_contestant_runs_beside_the_same_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["--host-rate", "70%"])
    assert "--host-rate needs a GPU" in capsys.readouterr().err
    running: list[float] = [0.0]
    during: list[float] = []

    class Loaders:
        def __init__(self, *, threads: int) -> None:
            assert threads == 14

        def leaving(self, share: float) -> Load:
            return Load(share=share, loaders=3.5, alone_gparams=5.0, loaded_gparams=3.4)

        @contextmanager
        def running(self, loaders: float) -> Iterator[None]:
            running.append(loaders)
            yield
            running.append(0.0)

        def close(self) -> None:
            running.append(-1.0)

    def run(contestant: Contestant, *others: object, **options: object) -> Outcome:
        during.append(running[-1])
        return Outcome(contestant=contestant, step_ms=(1.0,))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name, replaced in (
        ("DramLoad", Loaders),
        ("host_adam_threads", lambda: 14),
        ("calibrate_once", lambda gpus: None),
        ("take_part", run),
        ("make_tokens", lambda *_: None),
    ):
        monkeypatch.setattr(f"bench.train.__main__.{name}", replaced)
    options = ["--model", "tiny", "--no-chunked-loss", "--batch", "2", "--sequence", "64", "--out", str(tmp_path)]
    assert main([*options, "--contestants", "protrain,floor", "--host-rate", "70%"]) == 0
    assert during == [3.5, 3.5]
    assert running[-2:] == [0.0, -1.0]
    comparison = Comparison.load(tmp_path / "compare-tiny-2x64-host-at-70.json")
    assert comparison.task.host_share == 0.7
    assert comparison.dram_load == Load(share=0.7, loaders=3.5, alone_gparams=5.0, loaded_gparams=3.4)
    assert "3.50 loaders leave the host's AdamW 3.40 of 5.00 G parameters a second (68%)" in capsys.readouterr().out
