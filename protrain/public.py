"""The names of the package, which ``protrain/__init__.py`` imports from here when the first of them is used."""

from protrain.averaging import AveragedWeights
from protrain.checkpoint.export import export
from protrain.checkpoint.loading import load_checkpoint
from protrain.checkpoint.saving import async_save, save_checkpoint
from protrain.common.errors import BudgetError, CheckpointError, MisuseError, PlanError
from protrain.engine.states.empty import empty_parameters
from protrain.engine.weights.state_hooks import full_parameters, full_state_dict
from protrain.hardware.calibration import calibrate
from protrain.hardware.profile import HardwareProfile
from protrain.planning import Plan, search
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.trace import profile
from protrain.tracing import trace
from protrain.wrapping import wrap

__all__ = [
    "AveragedWeights",
    "BudgetError",
    "CheckpointError",
    "HardwareProfile",
    "MisuseError",
    "ModelProfile",
    "Plan",
    "PlanError",
    "async_save",
    "calibrate",
    "empty_parameters",
    "export",
    "full_parameters",
    "full_state_dict",
    "load_checkpoint",
    "profile",
    "save_checkpoint",
    "search",
    "trace",
    "wrap",
]
