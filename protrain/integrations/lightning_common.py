"""What the strategies of Lightning's Trainer and of Fabric have in common.

A checkpoint with the state of an optimizer is a folder: a save of ``save_checkpoint``, and a file of Lightning with the
rest. The rest is written first, and the save names it. So a process that is killed at any moment leaves the checkpoint
that was there before, or a hidden folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from protrain.checkpoint.manifest import find_save, list_saves, read_manifest
from protrain.checkpoint.saving import own_saves, save_checkpoint
from protrain.checkpoint.tensor_files import put_in_place
from protrain.distributed.joining import local_processes
from protrain.engine.weights.parameter import PresentParameter
from protrain.optim.optimizer import ProTrainOptimizer

_Base: Any = DDPStrategy if TYPE_CHECKING else object  # the type checker sees what stands behind it among the bases
_DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}


def dtype_of(precision: str) -> torch.dtype:
    """The type of weights that Lightning's ``precision`` means."""
    if precision not in _DTYPES:
        raise ValueError(f"precision={precision!r} is not one that ProTrain has: use bf16-mixed or 32-true")
    return _DTYPES[precision]


class Processes(_Base):
    """What both strategies do about processes: start and join them only where there are several."""

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes > 1:  # as it announces processes in the environment
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Take the device of this process, once there is one for each."""
        devices = len(self.parallel_devices or ())
        if self.local_rank >= devices:
            raise ValueError(
                f"{local_processes()} processes were started on this machine, each for a device of its own, and "
                f"Lightning was given {devices}: pass devices={local_processes()}"
            )
        super().setup_environment()

    def save_apart(self, path: Any, rest: dict[str, Any], model: Any, optimizer: ProTrainOptimizer) -> None:
        """Save in the folder ``path`` what each rank has of ``model`` and ``optimizer``, and ``rest`` in a file.

        A new folder gets its name when it is complete. In one that is there, two files take turns.
        """
        if "://" in str(path):
            raise ValueError(
                f"{path} is a URL, and a checkpoint to resume from is a folder: give one that all ranks see"
            )
        optimizer.ranks.meet("trainer.save_checkpoint() or fabric.save()")
        folder = Path(path).absolute()
        place = optimizer.ranks.of_first(folder if folder.is_dir() else folder.with_name(f".{folder.name}.tmp"))
        name = f"rest-{sum(int(save.name.partition('-')[0]) for save in list_saves(place)[-1:]) % 2}.pt"
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(rest, place / name)
        save = save_checkpoint(place, model, optimizer, extra=name, keep=1)
        if self.is_global_zero and place != folder:
            folder.unlink(missing_ok=True)  # a file, of a training without a plan
            put_in_place(place, folder)
        own_saves(optimizer).append(folder / save.name)


def rest_of(folder: Path) -> Path:
    """The file with the rest of a checkpoint."""
    return folder / str(read_manifest(find_save(folder))["extra"])


def has_plan(module: nn.Module) -> bool:
    """Whether weights lie in chunks. Before there is a plan, each rank has all of them."""
    return any(isinstance(parameter, PresentParameter) for parameter in module.parameters())
