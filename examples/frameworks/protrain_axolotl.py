"""axolotl on ProTrain: name the plugin in its configuration, `plugins: [protrain_axolotl.ProTrainPlugin]`."""

from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.core.trainers.dpo import DPOStrategy
from axolotl.integrations.base import BasePlugin

from protrain.integrations.transformers import on_protrain


class ProTrainPlugin(BasePlugin):
    """Puts axolotl's trainers on ProTrain."""

    def get_trainer_cls(self, cfg: Any) -> Any:
        """The class that trains, or None for axolotl's own choice. ValueError for what nobody has tried."""
        if not cfg.rl:
            # A packed batch is longer than its rows, so the plan is made for the loader's first batch.
            return on_protrain(AxolotlTrainer, **({"example_batch": None} if cfg.sample_packing else {}))
        if cfg.rl != "dpo":
            raise ValueError(f"rl: {cfg.rl} was not tried on ProTrain")
        # axolotl gives a plugin's trainer of preferences no model, so its own choice is changed.
        trainer = on_protrain(DPOStrategy.get_trainer_class())
        DPOStrategy.get_trainer_class = staticmethod(lambda: trainer)
        return None
