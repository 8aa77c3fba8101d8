"""The MODEL of the command line: a named shape, or a local Hugging Face folder, and what of it is trained.

Weights are never whole in memory. `--lora` adds an adapter, `--freeze` freezes parameters, and `--load-in-4bit` freezes
all weights: transformers quantises them with bitsandbytes while it loads, to NF4, with statistics that are quantised
too, as the paper of QLoRA does (arXiv 2305.14314). Such weights are whole on every device. Planning, and all that is
checked before weights are loaded, needs only their shapes, which ``shape_in_4bit`` makes at no cost.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain.cli.options import need, parse_lora
from protrain.cli.shapes import SHAPES, at_depth
from protrain.common.adapters import adapted_layers
from protrain.engine.states.empty import empty_parameters

# The names that families of transformers have for the number of tokens that they can tell apart by position.
_POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model whose parameters are on the meta device."""

    model: nn.Module
    folder: Path | None  # the folder of a Hugging Face model; None for a named shape, whose weights are random

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

    @property
    def sequence(self) -> int:
        """The default length of a sequence, which is that of the paper where the model has so many positions."""
        return min(1024, self.positions or 1024)

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
    with empty_parameters():
        config = transformers.AutoConfig.for_model(**at_depth(name, layers))
        model = transformers.AutoModelForCausalLM.from_config(config)
    return LoadedModel(model=model, folder=None)


def check_positions(loaded: LoadedModel, sequence: int) -> None:
    """Raise a ValueError unless the model has positions for ``sequence`` tokens, or computes them, as rotary ones."""
    positions = loaded.positions
    if positions is not None and sequence > positions and not getattr(loaded.config, "rope_parameters", None):
        raise ValueError(f"--sequence {sequence} is longer than the {positions} positions of the model")


def _folder_of(name: str) -> Path:
    """The folder ``name``. ValueError if it holds no model, which is found without transformers and so in no time."""
    if not Path(name, "config.json").is_file():  # as in a folder of an adapter
        raise ValueError(f"there is no model {name!r}: give a folder with config.json, or one of {', '.join(SHAPES)}")
    return Path(name)


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
    return LoadedModel(model=model, folder=folder)


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


def choose_trained(loaded: LoadedModel, lora: str | None, freeze: Sequence[str]) -> LoadedModel:
    """``loaded`` with the adapter that ``lora`` asks for, and with what matches ``freeze`` frozen.

    Raises:
        ValueError: peft is not installed, there is nothing to adapt or to freeze, or nothing is left to train.
    """
    named = dict(loaded.model.named_parameters(remove_duplicate=False))
    for pattern in freeze:
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, named, n=3) or list(named)[:3]
            raise ValueError(f"--freeze {pattern!r} matches no parameter; there are {', '.join(near)}, ...")
        for name in matching:
            named[name].requires_grad_(False)
    if lora is not None:
        loaded = replace(loaded, model=_with_adapter(loaded, parse_lora(lora)))
    if not any(parameter.requires_grad for parameter in loaded.model.parameters()):
        raise ValueError("--freeze leaves nothing to train: freeze less")
    return loaded


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with the groups that trainers make: the trainable matrices, and the vectors, which do not decay there."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trainable if p.dim() > 1], [p for p in trainable if p.dim() <= 1]]
    return torch.optim.AdamW([{"params": group} for group in groups if group])


def _with_adapter(loaded: LoadedModel, lora: dict[str, Any]) -> Any:
    need("peft", "--lora", extra="peft")
    import peft
    from transformers.pytorch_utils import Conv1D

    model: Any = loaded.model
    config = peft.LoraConfig(
        **lora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 has weights [in, out]
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if loaded.folder is None else str(loaded.folder),
    )
    with empty_parameters():
        adapted = peft.get_peft_model(model, config)
    for path, module in adapted_layers(adapted):
        if not isinstance(module.base_layer, nn.Linear | Conv1D):  # such as experts, which peft adapts by values
            raise ValueError(
                f"--lora: {path} is no linear layer, and only such get adapters: give targets that leave it out, like "
                "targets=q_proj+k_proj+v_proj+o_proj"
            )
    return adapted


def shape_in_4bit(model: Any) -> None:
    """Give ``model``, which has no adapter yet, 4-bit weights on the meta device.

    Raises:
        ValueError: bitsandbytes or accelerate is not installed.
    """
    for package in ("accelerate", "bitsandbytes"):  # transformers loads quantised models with both
        need(package, "--load-in-4bit", extra="qlora")
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model, device_map={"": "meta"})
    quantizer.postprocess_model(model)
    with torch.device("cpu"):  # bitsandbytes keeps the table of its first call, which is to have values
        quantize_4bit(torch.zeros(64), compress_statistics=True)
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            numbers, state = quantize_4bit(layer.weight.data, compress_statistics=True, quant_type="nf4")
            layer.weight = Params4bit(
                numbers, quant_type="nf4", compress_statistics=True, quant_state=state, module=layer, bnb_quantized=True
            )
