"""The loss scale of float16 can fall below 1, and a warning says when nothing helps."""

from __future__ import annotations

import warnings

import pytest

from protrain.engine.gradients.clipping import LossScale


def test_it_falls_as_far_as_it_must() -> None:
    scale = LossScale()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(28):
            assert not scale.update(finite=False)
    with scale.for_backward() as factor:
        assert factor == 2.0**-12
    assert scale.update(finite=True)
    assert scale.skipped == 28


def test_a_loss_that_no_scale_helps_is_named() -> None:
    scale = LossScale()
    for _ in range(40):
        scale.update(finite=False)
    with pytest.warns(UserWarning, match="41 steps were skipped.*train in bfloat16"):
        scale.update(finite=False)
    with scale.for_backward() as factor:
        assert factor == 2.0**-24
