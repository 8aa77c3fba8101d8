"""The MODEL of the command line: a named shape, or a local Hugging Face folder. Weights are never whole in memory."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain.cli.options import need
from protrain.cli.shapes import SHAPES, shape_config
from protrain.engine.states.empty import empty_parameters

# The names that families of transformers have for the number of tokens that they can tell apart by position.
_POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model whose parameters are on the meta device."""

    model: nn.Module
    folder: Path | None  # the folder of a Hugging Face model; None for a named shape, whose weights are random
    sequence: int  # the default length of a sequence

    @property
    def config(self) -> Any:
        """The transformers configuration, of a model that sees pictures too that of its text."""
        model: Any = self.model
        return model.config.get_text_config(decoder=True)

    @property
    def positions(self) -> int | None:
        """The number of tokens that the model has positions for. None: it computes them, or has none."""
        found = [number for name in _POSITIONS if (number := getattr(self.config, name, None)) is not None]
        if not found or found[0] == -1:  # XLNet says so that there is no limit
            return None
        return int(found[0])

    def arguments(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The arguments of the model for ``batch``.

        From the positions of packed rows most models of transformers know where rows begin, and then no token attends
        to another row. They look at them only without a cache. Other models see the rows as one text.
        """
        model: Any = self.model
        taken = inspect.signature(type(getattr(model, "get_base_model", lambda: model)()).forward).parameters
        if "position_ids" in batch and {"position_ids", "use_cache"} <= taken.keys():
            return {**batch, "use_cache": False}
        return {name: value for name, value in batch.items() if name != "position_ids"}


def read_architecture(name: str, *, layers: int | None = None) -> LoadedModel:
    """The architecture that MODEL names: a shape, perhaps with another number of ``layers``, or a folder's config.json.

    Raises:
        ValueError: There is no such shape or folder, its model cannot be trained, or transformers is not installed.
    """
    if name not in SHAPES:
        folder = _folder_of(name)
        if layers is not None:
            raise ValueError(f"layers={layers}: only named shapes come at any depth ({', '.join(SHAPES)})")
        return _from_folder(folder, _transformers())
    transformers = _transformers()
    shape = SHAPES[name] if layers is None else replace(SHAPES[name], layers=layers)
    with empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(shape_config(shape))
    return LoadedModel(model=model, folder=None, sequence=shape.sequence)


def check_positions(loaded: LoadedModel, sequence: int) -> None:
    """Raise a ValueError unless the model has positions for ``sequence`` tokens, or computes them, as rotary ones."""
    positions = loaded.positions
    if positions is not None and sequence > positions and not getattr(loaded.config, "rope_parameters", None):
        raise ValueError(f"--sequence {sequence} is longer than the {positions} positions of the model")


def _folder_of(name: str) -> Path:
    """The folder ``name``. ValueError if it holds no model, which is found without transformers and so in no time."""
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(f"there is no model {name!r}: give a folder with config.json, or one of {', '.join(SHAPES)}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: give a folder to which a model was saved, and no adapter")
    return folder


def _from_folder(folder: Path, transformers: Any) -> LoadedModel:
    # A file's values can raise anything: checks of transformers, torch's own errors, a division by zero.
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with empty_parameters():
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\nModel type should be")[0]  # and the names of all
        raise ValueError(
            f"{folder} is no causal language model that transformers can load: {' '.join(said.split())}"
        ) from error
    _refuse_untrainable(folder, config, model)
    loaded = LoadedModel(model=model, folder=folder, sequence=1024)
    positions = loaded.sequence if loaded.positions is None else loaded.positions
    return replace(loaded, sequence=min(loaded.sequence, positions))


def _refuse_untrainable(folder: Path, config: Any, model: nn.Module) -> None:
    if any(getattr(part, "quantization_config", None) is not None for part in (config, *vars(config).values())):
        # This also refuses weights that are not quantized, because the trained model's config would say that they were.
        raise ValueError(
            f"{folder}: its config.json has a quantization_config, and quantized weights cannot be trained; take the "
            "model before it was quantized, or save what from_pretrained(...).dequantize() gives; where the weights "
            "are not quantized, take quantization_config out of config.json"
        )
    encodes = any(getattr(module, "is_decoder", None) is False for module in model.modules())
    if getattr(config, "is_decoder", None) is False and encodes:  # other families see no later token anyway
        raise ValueError(
            f"{folder}: in this model ({config.model_type}) a token sees those that follow it, which it is to predict; "
            'put "is_decoder": true into its config.json'
        )


def _transformers() -> Any:
    need("transformers", "a model", extra="hf")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers
