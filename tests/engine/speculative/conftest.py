"""Fixtures of the tests of speculative updates."""

from __future__ import annotations

import pytest

from protrain.engine.updates.host_updates import Window
from tests.engine.harness import CKPT, NONE, Spec


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> Spec:
    """Speculative updates of all states in some chunks and of weights alone in the others.

    A test may ask for "states" or "weights" in every chunk by an indirect parameter.
    """
    kind = getattr(request, "param", "both")
    weights, whole = kind != "states", kind == "both"
    return Spec("none", "least", (NONE, CKPT), speculate=True, weights=weights, whole=whole)


@pytest.fixture(autouse=True)
def always_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the host had begun every speculative update before backward was over."""
    monkeypatch.setattr(Window, "is_closed", lambda _: False)
