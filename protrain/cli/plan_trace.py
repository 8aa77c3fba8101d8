"""Traces the step that `protrain plan` plans for: on this machine, or without values where it is to run elsewhere.

Only this part of planning needs torch and transformers, whose imports take longer than a search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from protrain.cli.data import example_batch, stand_in
from protrain.cli.models import LoadedModel, fit_positions, read_architecture
from protrain.cli.plan_step import PlannedStep
from protrain.cli.trained import adamw, choose_trained, shape_in_4bit
from protrain.common.parameters import DTYPES
from protrain.forwards import change_forwards
from protrain.profiler.cache import cached_profile
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.trace import profile


def measured(step: PlannedStep, *, device_bytes: int, show: Callable[[str], None]) -> ModelProfile | None:
    """The profile of ``step`` on this machine. It is None if that takes more memory than the device has.

    Measuring takes at most ``device_bytes``.
    """
    try:
        return _profile(_architecture(step), step, elsewhere=False, device_bytes=device_bytes, show=show)
    except torch.OutOfMemoryError:
        return None


def counted(step: PlannedStep, *, show: Callable[[str], None]) -> ModelProfile:
    """The profile of ``step`` from the shapes of its tensors."""
    with torch.device("meta"):  # nothing is computed, so there is no need for a record of how values are made
        architecture = _architecture(step)
    return _profile(architecture, step, elsewhere=True, show=show)


def _architecture(step: PlannedStep) -> LoadedModel:
    loaded = read_architecture(step.model, layers=step.layers)
    if step.load_in_4bit:
        shape_in_4bit(loaded.model)
    return choose_trained(loaded, step.lora, step.freeze)


def _profile(architecture: LoadedModel, step: PlannedStep, *, elsewhere: bool, **options: Any) -> ModelProfile:
    return profile_of(
        architecture,
        batch=step.batch,
        sequence=step.sequence or architecture.sequence,
        rows=step.rows,
        device=torch.device(step.device_type),
        dtype=DTYPES[step.dtype],
        compile=step.compile,
        chunked_loss=step.chunked_loss,
        elsewhere=elsewhere,
        **options,
    )


def profile_of(
    architecture: LoadedModel,
    *,
    batch: int,
    sequence: int,
    device: torch.device,
    dtype: torch.dtype,
    compile: bool,
    chunked_loss: bool,
    elsewhere: bool,
    rows: bool = False,
    show: Callable[[str], None] | None = None,
    device_bytes: int | None = None,
) -> ModelProfile:
    """The profile of a step of `protrain train` on ``device``. The forwards of the model are changed.

    If it is to run ``elsewhere``, operations are counted on the meta device, as times of another machine cannot be
    measured here. If sequences are packed of ``rows`` of data, attention needs a mask. Measuring takes at most
    ``device_bytes``.
    """
    fit_positions(architecture, sequence)
    example = example_batch(stand_in(sequence, rows=rows), seed=0, batch=batch, sequence=sequence)
    if compile and elsewhere:
        torch.compiler.reset()  # there is a limit to what is kept of one function, and these may be many models
    change_forwards(architecture.model, device, compile=compile, chunked_loss=chunked_loss, on_meta=elsewhere)
    optimizer = adamw(architecture.model, architecture.learning_rate, weight_decay=0.0)
    how: dict[str, Any] = {"optimizer": optimizer, "dtype": dtype, "show": show}
    if elsewhere:
        return profile(architecture.model, architecture.arguments(example), device="meta", **how)
    return cached_profile(
        architecture.model, architecture.arguments(example), device=device, device_bytes=device_bytes, **how
    )
