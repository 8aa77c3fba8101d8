"""What a plan is valid for, in few characters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from protrain.profiler.model_profile import ModelProfile, ParameterRecord


def fingerprint(profile: ModelProfile) -> str:
    """What a plan is valid for: parameters, their shapes and optimizer groups, units, blocks, dtype; not the batch.

    Two parts: what is known without a profile, and the rest.
    """
    units = [(unit.name, unit.block, unit.parameters) for unit in profile.units]
    rest = _digest([units, [block.name for block in profile.blocks]])
    return f"{parameters_fingerprint(profile.parameters, profile.dtype)}-{rest}"


def parameters_fingerprint(parameters: Iterable[ParameterRecord], dtype: str) -> str:
    """The first part of :func:`fingerprint`."""
    return _digest([dtype, [(record.name, record.shape, record.group) for record in parameters]])


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
