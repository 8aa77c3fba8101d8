"""ms-swift on ProTrain: `swift sft --external_plugins protrain_swift.py ...`."""

from swift.trainers import TrainerFactory

from protrain.integrations.transformers import on_protrain

own = TrainerFactory.get_trainer_cls
TrainerFactory.get_trainer_cls = staticmethod(lambda args: on_protrain(own(args)))
