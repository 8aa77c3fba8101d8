"""Names what a plan was made for, where that is something else than what is at hand."""

from __future__ import annotations

from dataclasses import replace

from protrain.errors import PlanError
from protrain.planning.plan import Plan
from protrain.planning.search import fingerprint
from protrain.profiler.model_profile import ModelProfile

_DTYPES = ("bfloat16", "float16", "float32")
_REMEDY = "make a new plan, or leave plan= out to have one searched"


def refuse_other_model(plan: Plan, profile: ModelProfile) -> None:
    """ValueError, naming the difference, when ``plan`` was made for another model, dtype or optimizer grouping.

    A plan holds a fingerprint of its model, from which nothing can be read back: what differs is found by trying.
    """
    if plan.model == fingerprint(profile):
        return
    raise ValueError(
        f"the plan was made for another model than {profile.model}: {_difference(plan, profile)}; {_REMEDY}"
    )


def name_other_use(error: PlanError, plan: Plan, profile: ModelProfile) -> PlanError:
    """``error`` of a plan that does not fit, naming what ``plan`` was made for that takes less."""
    if plan.accumulation == 1 < profile.accumulation:
        made_for = f"accumulation=1, and here it is {profile.accumulation}: make"
    elif plan.chunked_loss and not profile.chunked_loss and error.where != "host":
        made_for = "chunked_loss=True, and here logits are whole: pass it here as well, or make"
    else:
        return error
    return PlanError(
        where=error.where,
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
        largest_part=error.largest_part,
        remedy=f"The plan was made for {made_for} a new plan. {error.remedy}",
    )


def _difference(plan: Plan, profile: ModelProfile) -> str:
    for dtype in _DTYPES:
        if plan.model == fingerprint(replace(profile, dtype=dtype)):
            return f"its dtype differs, {dtype} in place of {profile.dtype}"
    if len(plan.block_modes) != len(profile.blocks):
        return f"it has {len(plan.block_modes)} blocks, this one {len(profile.blocks)}"
    one_group = tuple(replace(record, group=min(record.group, 0)) for record in profile.parameters)
    if plan.model == fingerprint(replace(profile, parameters=one_group)):
        return "its optimizer has a single group of parameters, this one several"
    return f"its parameters or their optimizer groups differ (fingerprint {plan.model}, here {fingerprint(profile)})"
