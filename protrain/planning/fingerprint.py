"""A fingerprint of what a plan is valid for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from protrain.profiler.model_profile import ModelProfile, ParameterRecord


def fingerprint(profile: ModelProfile) -> str:
    """A hash of parameters, their shapes and optimizer groups, units, blocks and dtype. The batch is not part of it.

    It has two parts: a hash of what is known without a profile, and a hash of the rest.
    """
    units = [(unit.name, unit.block, unit.parameters) for unit in profile.units]
    rest = _digest([units, [block.name for block in profile.blocks]])
    return f"{parameters_fingerprint(profile.parameters, profile.dtype)}-{rest}"


def parameters_fingerprint(parameters: Iterable[ParameterRecord], dtype: str) -> str:
    """The first part of :func:`fingerprint`."""
    return _digest([dtype, [(record.name, record.shape, record.group) for record in parameters]])


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
