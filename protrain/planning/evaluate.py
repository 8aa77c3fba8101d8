"""Plans that the caller gives, by their integers or from a file."""

from __future__ import annotations

from protrain.hardware.profile import HardwareProfile
from protrain.planning.infeasible import device_error, host_error
from protrain.planning.layout import pack
from protrain.planning.mismatch import refuse_other_model, refuse_other_world_size
from protrain.planning.plan import BlockMode, Counts, Plan
from protrain.planning.predict import Models
from protrain.planning.ranges import check_counts
from protrain.profiler.model_profile import ModelProfile


def evaluate(
    profile: ModelProfile,
    hardware: HardwareProfile,
    *,
    n_persist: int,
    n_buffer: int,
    n_swap: int,
    n_ckpt: int,
    n_ckpt_swap: int = 0,
    n_speculate: int = 0,
    n_weight_only: int = 0,
    n_device_sum: int = 0,
    stream: bool | None = None,
    keep_attention: bool = False,
    chunk_elements: int | None = None,
    step_during_backward: bool = False,
) -> Plan:
    """Make a plan by hand: the plan of these integers, with its predictions.

    ``stream`` says whether the GPU may update chunks in host memory. By default it may if calibration knows how fast.

    Raises:
        ValueError: a count is out of range; the message says the range.
        PlanError: the plan does not fit ``hardware``.
    """
    layout = pack(profile, chunk_elements, hardware.world_size)
    models = Models(
        profile,
        hardware,
        layout,
        step_during_backward=step_during_backward,
        keep_attention=keep_attention,
        stream=stream,
    )
    counts = Counts(n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_weight_only, n_device_sum)
    check_counts(counts, models)
    plan = models.plan(counts)
    _check_fits(models, plan)
    return plan


def check(plan: Plan, profile: ModelProfile, hardware: HardwareProfile, *, step_during_backward: bool = False) -> Plan:
    """``plan``, from a file for instance, with new predictions for ``profile`` and ``hardware``.

    Raises:
        ValueError: the plan was made for another model, optimizer grouping or number of ranks, or contradicts itself.
        PlanError: the plan does not fit ``hardware`` with the batch of ``profile``.
    """
    refuse_other_model(plan, profile)
    refuse_other_world_size(plan, hardware.world_size)
    models = Models.of(plan, profile, hardware, step_during_backward=step_during_backward)
    if plan.n_chunks != len(models.layout.chunks):
        raise ValueError(f"the plan says n_chunks={plan.n_chunks}, but the model has {len(models.layout.chunks)}")
    n_swap, n_offload = (plan.block_modes.count(kind) for kind in (BlockMode.SWAP, BlockMode.CKPT_SWAP))
    n_ckpt = sum(mode.recomputes for mode in plan.block_modes)
    modes = (plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
    if len(plan.block_modes) != len(profile.blocks) or (n_swap, n_ckpt, n_offload) != modes:
        raise ValueError(
            f"the plan's block_modes name {len(plan.block_modes)} blocks, {n_swap} swapped and {n_ckpt} checkpointed, "
            f"{n_offload} of these with offloaded inputs; the model has {len(profile.blocks)} blocks and the plan says "
            f"n_swap={plan.n_swap}, n_ckpt={plan.n_ckpt}, n_ckpt_swap={plan.n_ckpt_swap}"
        )
    check_counts(plan.counts, models)
    fresh = models.plan(plan.counts, plan.block_modes)
    _check_fits(models, fresh)
    return fresh


def _check_fits(models: Models, plan: Plan) -> None:
    """Raise PlanError if ``plan`` needs more memory than there is."""
    activations = models.memory.activations(plan.block_modes)
    if plan.device_bytes > models.hardware.device_bytes:
        raise device_error(models.memory, plan.counts, activations, given=True)
    if plan.host_bytes > models.hardware.host_bytes:
        raise host_error(models.memory, plan.counts, activations, given=True)
