"""Frameworks that choose their Trainer themselves: each gets its own on ProTrain.

The frameworks pin old libraries, so they are not installed here. Modules with their names stand in for them.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
_Trainer: Any = transformers.Trainer
ProTrainMixin: Any = importlib.import_module("protrain.integrations.transformers").ProTrainMixin


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """A module of that name, with its parents."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path not in sys.modules:
            module = ModuleType(path)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
    vars(sys.modules[name]).update(contents)
    return sys.modules[name]


class _Own(_Trainer):
    """The Trainer of a framework."""


def _file(name: str) -> dict[str, Any]:
    """What the file ``name`` of the examples defines, once it has run."""
    return runpy.run_path(str(Path(__file__).parents[2] / "examples/frameworks" / name))


def test_llamafactory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one kind the Trainer lies in the module of its own alone, as the workflow imports it when it runs."""
    ran = []
    modules = {}
    for kind, name in {"pt": "CustomTrainer", "sft": "CustomSeq2SeqTrainer", "dpo": "CustomDPOTrainer"}.items():
        modules[kind] = _module(monkeypatch, f"llamafactory.train.{kind}.trainer", **{name: _Own})
        in_workflow = {} if kind == "dpo" else {name: _Own}
        modules[f"{kind}.workflow"] = _module(monkeypatch, f"llamafactory.train.{kind}.workflow", **in_workflow)
    _module(monkeypatch, "llamafactory.train.tuner", run_exp=lambda: ran.append(True))
    _file("protrain_llamafactory.py")
    assert ran
    assert issubclass(modules["sft.workflow"].CustomSeq2SeqTrainer, ProTrainMixin)
    assert issubclass(modules["dpo"].CustomDPOTrainer, ProTrainMixin)


def test_axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    class DPOStrategy:
        @staticmethod
        def get_trainer_class() -> type[Any]:
            return _Own

    _module(monkeypatch, "axolotl.core.trainers", AxolotlTrainer=_Own)
    _module(monkeypatch, "axolotl.core.trainers.dpo", DPOStrategy=DPOStrategy)
    _module(monkeypatch, "axolotl.integrations.base", BasePlugin=object)
    plugin = _file("protrain_axolotl.py")["ProTrainPlugin"]()
    assert issubclass(plugin.get_trainer_cls(SimpleNamespace(rl=None, sample_packing=True)), ProTrainMixin)
    assert plugin.get_trainer_cls(SimpleNamespace(rl="dpo")) is None
    assert issubclass(DPOStrategy.get_trainer_class(), ProTrainMixin)
    assert DPOStrategy.get_trainer_class() is DPOStrategy.get_trainer_class(), "axolotl compares them"
    with pytest.raises(ValueError, match="rl: grpo was not tried on ProTrain"):
        plugin.get_trainer_cls(SimpleNamespace(rl="grpo"))


def test_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    class TrainerFactory:
        @classmethod
        def get_trainer_cls(cls, args: Any) -> type[Any]:
            assert args == "arguments"
            return _Own

    _module(monkeypatch, "swift.trainers", TrainerFactory=TrainerFactory)
    for _ in range(2):  # of which the second finds a trainer that is on ProTrain
        _file("protrain_swift.py")
    assert issubclass(TrainerFactory.get_trainer_cls("arguments"), ProTrainMixin)
