"""Models of the Hugging Face Hub, by names like org/model. They lie in the cache that transformers also uses."""

from __future__ import annotations

from pathlib import Path

from protrain.cli.options import need
from protrain.cli.shapes import SHAPES
from protrain.common.errors import HUB_NAME

_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")  # the configuration, and the files of tokenizers
_WEIGHTS = ("*.safetensors",)  # some models have all weights twice: in "consolidated" files, too


def on_disk(name: str, *, weights: bool) -> str:
    """``name``, or the folder of the model that ``name`` is on the Hub. What the cache lacks of it is downloaded.

    The folder is that of one revision. So a run that notes the folder goes on with the weights that it began with,
    whatever the Hub has by then.

    Args:
        name: a folder, a shape, or a name on the Hub.
        weights: whether the folder must have the weights, too.

    Raises:
        ValueError: ``name`` can only be a name on the Hub, and the Hub does not give such a model.
    """
    if not HUB_NAME.fullmatch(name) or Path(name).exists():
        return name
    need("huggingface_hub", f"the model {name!r} of the Hugging Face Hub", extra="hf")
    from huggingface_hub import snapshot_download

    wanted = [*_DESCRIPTION, *(_WEIGHTS if weights else ())]
    try:
        return str(snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:  # errors of the network, of access rights and of the disk have no common class
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"there is no model {name!r}: it is no folder here, and the Hugging Face Hub does not give it ({reason}). "
            f"Give a folder with config.json, or one of {', '.join(SHAPES)}"
        ) from error


def is_of(folder: str, name: str) -> bool:
    """Whether ``folder`` is in the cache, and of the model that has ``name`` on the Hub."""
    return bool(HUB_NAME.fullmatch(name)) and f"models--{name.replace('/', '--')}" in Path(folder).parts
