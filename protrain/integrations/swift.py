"""ms-swift on ProTrain: a file that its commands are given.

swift sft --external_plugins "$(python -c 'import protrain; print(protrain.__path__[0])')/integrations/swift.py" ...
"""

from __future__ import annotations

from typing import Any

from swift.trainers import TrainerFactory

from protrain.integrations.transformers import on_protrain

_get_trainer_cls = TrainerFactory.get_trainer_cls.__func__


def _on_protrain(cls: Any, args: Any) -> type[Any]:
    return on_protrain(_get_trainer_cls(cls, args))


TrainerFactory.get_trainer_cls = classmethod(_on_protrain)
