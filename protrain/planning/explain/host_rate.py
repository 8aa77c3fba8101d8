"""The predicted rate of the host's updates in a step, with which a report compares the measured rate."""

from __future__ import annotations

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import updated_chunks
from protrain.planning.plan import Plan, layout_of
from protrain.planning.predict import predict
from protrain.planning.rates.update_rates import host_update_gparams
from protrain.planning.timeline import HOST
from protrain.profiler.model_profile import ModelProfile

_WHOLE = ("update", "speculative update", "deferred update")


def host_gparams(
    plan: Plan, profile: ModelProfile, hardware: HardwareProfile, *, step_during_backward: bool = False
) -> float:
    """Predicted 1e9 parameters a second of the host's whole updates under ``plan``, 0 if it makes none."""
    layout = layout_of(profile, plan)
    if hardware.device_type == "cpu":  # on a CPU nothing runs beside the updates
        is_any_away = any(chunk >= plan.n_persist for chunk in updated_chunks(profile, layout))
        return host_update_gparams(profile, hardware) if is_any_away else 0.0
    elements, milliseconds = 0, 0.0
    timeline = predict(profile, hardware, plan, step_during_backward=step_during_backward).timeline
    for operation in timeline.operations:
        kind, _, chunk = operation.name.rpartition(" ")
        if operation.lane == HOST and kind in _WHOLE:
            elements += layout.shard_elements(layout.chunks[int(chunk)])
            milliseconds += operation.end_ms - operation.start_ms
    return elements / milliseconds / 1e6 if milliseconds else 0.0
