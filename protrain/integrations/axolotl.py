"""axolotl on ProTrain: a plugin, which the configuration names.

plugins:
  - protrain.integrations.axolotl.ProTrainPlugin
"""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin

from protrain.integrations.transformers import on_protrain


class ProTrainPlugin(BasePlugin):
    """Trains on ProTrain: pretraining, SFT and LoRA, and DPO."""

    def get_trainer_cls(self, cfg: Any) -> type[Any] | None:
        """The Trainer that axolotl would use, on ProTrain.

        Of preferences axolotl gives a plugin's Trainer neither model nor reference, so there its own choice is changed.

        Raises:
            ValueError: the configuration asks for a way to train that was not tried.
        """
        if not cfg.rl:
            return on_protrain(AxolotlTrainer)
        if cfg.rl != "dpo":
            raise ValueError(f"rl: {cfg.rl} is not known to work on ProTrain: leave the plugin out, or use rl: dpo")
        from axolotl.core.trainers.dpo import DPOStrategy

        trainer = on_protrain(DPOStrategy.get_trainer_class())
        DPOStrategy.get_trainer_class = staticmethod(lambda: trainer)
        return None
