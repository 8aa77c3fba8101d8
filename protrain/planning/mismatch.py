"""Errors for a plan that was made for another model, number of ranks or options, which name the difference."""

from __future__ import annotations

from dataclasses import replace

from protrain.common.errors import PlanError
from protrain.planning.plan import Plan, fingerprint, parameters_fingerprint
from protrain.profiler.model_profile import ModelProfile, ParameterRecord

_DTYPES = ("bfloat16", "float16", "float32")
_REMEDY = "make a new plan, or leave plan= out to have one searched"


def refuse_other_parameters(
    plan: Plan, model: str, parameters: tuple[ParameterRecord, ...], dtype: str, *, n_blocks: int
) -> None:
    """Raise ValueError if ``plan`` was made for other parameters, dtype or optimizer groups. It names the difference.

    This needs no profile. A plan holds a hash of what it was made for, so the difference is found by trying.
    """
    made_for = plan.model.partition("-")[0]
    if made_for == parameters_fingerprint(parameters, dtype):
        return
    one_group = tuple(replace(record, group=min(record.group, 0)) for record in parameters)
    others = [other for other in _DTYPES if made_for == parameters_fingerprint(parameters, other)]
    if others:
        difference = f"its dtype differs, {others[0]} in place of {dtype}"
    elif len(plan.block_modes) != n_blocks:
        difference = f"it has {len(plan.block_modes)} blocks, this one {n_blocks}"
    elif made_for == parameters_fingerprint(one_group, dtype):
        difference = "its optimizer has a single group of parameters, this one several"
    else:
        difference = "its parameters or their optimizer groups differ"
    raise _other_model(model, difference)


def refuse_other_model(plan: Plan, profile: ModelProfile) -> None:
    """Raise ValueError if ``plan`` was made for another model, even for one of the same parameters."""
    n_blocks = len(profile.blocks)
    refuse_other_parameters(plan, profile.model, profile.parameters, profile.dtype, n_blocks=n_blocks)
    if plan.model != fingerprint(profile):
        raise _other_model(profile.model, "it has the same parameters, but other modules use them, or in another order")


def refuse_other_world_size(plan: Plan, world_size: int) -> None:
    """Raise ValueError if ``plan`` was made for another number of ranks than ``world_size``."""
    if plan.world_size != world_size:
        raise ValueError(
            f"the plan was made for world_size={plan.world_size}, and here it is {world_size}: every rank has another "
            f"share of the model states; start {plan.world_size} process{'es' * (plan.world_size > 1)}, {_REMEDY}"
        )


def _other_model(model: str, difference: str) -> ValueError:
    return ValueError(f"the plan was made for another model than {model}: {difference}; {_REMEDY}")


def name_other_use(error: PlanError, plan: Plan, profile: ModelProfile) -> PlanError:
    """``error`` of a ``plan`` that does not fit, which also names the option that the plan was made for, if any."""
    planned_bytes = plan.host_bytes if error.where == "host" else plan.device_bytes
    if plan.accumulation == 1 < profile.accumulation:
        made_for = f"accumulation=1, and here it is {profile.accumulation}: make"
    elif plan.moment_dtype == "bfloat16" != profile.moment_dtype and planned_bytes <= error.available_bytes:
        made_for = f"moment_dtype=bfloat16, and here it is {profile.moment_dtype}: pass it here as well, or make"
    elif plan.chunked_loss and not profile.chunked_loss and error.where != "host":
        made_for = "chunked_loss=True, and here logits are whole: pass it here as well, or make"
    else:
        return error
    return replace(error, remedy=f"The plan was made for {made_for} a new plan. {error.remedy}", given=True)
