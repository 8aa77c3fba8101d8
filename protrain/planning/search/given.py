"""Plans that are given: by their integers, or from a file."""

from __future__ import annotations

from protrain.hardware.profile import HardwareProfile
from protrain.planning.fingerprint import fingerprint
from protrain.planning.layout import choose_chunk_elements, pack
from protrain.planning.plan import BlockMode, Plan, block_modes
from protrain.planning.search.infeasible import device_error, host_error
from protrain.planning.search.models import Models
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
    early_weights: bool = False,
    n_whole: int = 0,
    n_stream: int = 0,
    keep_attention: bool = False,
    chunk_elements: int | None = None,
    large_first: bool = False,
    step_during_backward: bool = False,
) -> Plan:
    """The plan of these integers, with its predictions: how to make a plan by hand.

    Raises:
        ValueError: a count is out of range; the message says the range.
        PlanError: the plan does not fit ``hardware``.
    """
    layout = pack(profile, chunk_elements or choose_chunk_elements(profile), large_first=large_first)
    models = Models(profile, hardware, layout, step_during_backward, keep_attention=keep_attention)
    counts = n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_stream
    _check_counts(models, *counts, early_weights=early_weights, n_whole=n_whole)
    plan = models.plan(*counts, early_weights=early_weights, n_whole=n_whole)
    _check_fits(models, plan)
    return plan


def check(plan: Plan, profile: ModelProfile, hardware: HardwareProfile, *, step_during_backward: bool = False) -> Plan:
    """``plan``, which may come from a file, with its predictions made anew for ``profile`` and ``hardware``.

    Raises:
        ValueError: the plan was made for another model or optimizer grouping, or contradicts itself.
        PlanError: it does not fit ``hardware``, or the batch of ``profile``.
    """
    expected = fingerprint(profile)
    if plan.model != expected:
        raise ValueError(
            f"the plan was made for another model (fingerprint {plan.model}, this one's is {expected}): parameters, "
            "their optimizer groups or the dtype differ; make a new plan, or leave plan= out to have one searched"
        )
    models = Models.of(plan, profile, hardware, step_during_backward)
    if plan.n_chunks != len(models.layout.chunks):
        raise ValueError(f"the plan says n_chunks={plan.n_chunks}, but the model has {len(models.layout.chunks)}")
    n_swap, n_moved = (plan.block_modes.count(kind) for kind in (BlockMode.SWAP, BlockMode.CKPT_SWAP))
    n_ckpt = sum(mode.recomputes for mode in plan.block_modes)
    modes = (plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
    if len(plan.block_modes) != len(profile.blocks) or (n_swap, n_ckpt, n_moved) != modes:
        raise ValueError(
            f"the plan's block_modes name {len(plan.block_modes)} blocks, {n_swap} swapped and {n_ckpt} checkpointed, "
            f"{n_moved} of these with moved inputs; the model has {len(profile.blocks)} blocks and the plan says "
            f"n_swap={plan.n_swap}, n_ckpt={plan.n_ckpt}, n_ckpt_swap={plan.n_ckpt_swap}"
        )
    counts = (plan.n_persist, plan.n_buffer, *modes, plan.n_speculate, plan.n_stream)
    _check_counts(models, *counts, early_weights=plan.early_weights, n_whole=plan.n_whole)
    fresh = models.again(plan)
    _check_fits(models, fresh)
    return fresh


def _check_counts(
    models: Models,
    n_persist: int,
    n_buffer: int,
    n_swap: int,
    n_ckpt: int,
    n_ckpt_swap: int,
    n_speculate: int,
    n_stream: int,
    *,
    early_weights: bool,
    n_whole: int,
) -> None:
    """ValueError for a count out of range."""
    n_chunks = len(models.layout.chunks)
    if not 0 <= n_persist <= n_chunks:
        raise ValueError(f"n_persist must be 0 to {n_chunks}, the number of chunks, not {n_persist}")
    least, most = models.memory.least_buffers(n_persist), models.memory.all_buffers(n_persist)
    if not least <= n_buffer <= most:
        raise ValueError(
            f"n_buffer must be {least} to {most} when {n_persist} of {n_chunks} chunks are persistent, not "
            f"{n_buffer}: a unit holds up to {least} non-persistent chunks at once"
        )
    if not 0 <= n_speculate <= n_chunks - n_persist:
        away = n_chunks - n_persist
        raise ValueError(f"n_speculate must be 0 to {away}, the number of chunks in host memory, not {n_speculate}")
    if n_speculate and models.in_backward:
        raise ValueError("n_speculate must be 0 with step_during_backward=True: no update waits for step() then")
    if n_whole and not early_weights:
        raise ValueError(f"n_whole must be 0 without early_weights, where early updates are whole, not {n_whole}")
    if not 0 <= n_whole < max(1, n_speculate):
        raise ValueError(
            f"n_whole must be 0 to {max(0, n_speculate - 1)}, fewer than the early updates, not {n_whole}: where "
            "all of them are to be whole, leave out early_weights"
        )
    candidates = models.runtime.streamable(n_persist, n_speculate)
    if not 0 <= n_stream <= candidates:
        raise ValueError(
            f"n_stream must be 0 to {candidates}, the number of chunks in host memory that are trained and not "
            f"updated early, not {n_stream}"
        )
    block_modes(len(models.profile.blocks), n_swap, n_ckpt, n_ckpt_swap)


def _check_fits(models: Models, plan: Plan) -> None:
    """PlanError when ``plan`` needs more than there is."""
    activations = models.memory.activations(plan.block_modes)
    if plan.device_bytes > models.hardware.device_bytes:
        raise device_error(
            models.memory, plan.n_persist, plan.n_buffer, activations, n_stream=plan.n_stream, given=True
        )
    if plan.host_bytes > models.hardware.host_bytes:
        raise host_error(
            models.kinds[plan.early_weights][0],
            plan.n_persist,
            activations,
            n_speculate=plan.n_speculate,
            n_whole=plan.n_whole,
            given=True,
        )
