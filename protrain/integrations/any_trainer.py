"""Makes a class of any Trainer, for frameworks that choose their Trainer themselves."""

from __future__ import annotations

from typing import Any

from protrain.integrations.transformers import ProTrainMixin


def on_protrain(trainer: type[Any]) -> type[Any]:
    """The class ``trainer`` on ProTrain, or ``trainer`` itself if it already is.

    Frameworks have no place for the arguments of ``protrain.wrap``. Its memory can be limited by the environment
    variables PROTRAIN_DEVICE_MEMORY and PROTRAIN_HOST_MEMORY.
    """
    if issubclass(trainer, ProTrainMixin):
        return trainer
    return type(f"ProTrain{trainer.__name__}", (ProTrainMixin, trainer), {"__module__": trainer.__module__})
