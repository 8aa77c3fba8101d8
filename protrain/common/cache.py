"""Where files are kept: what ProTrain measured on this machine (profiles, calibrations), and models of the Hub.

``PROTRAIN_CACHE`` names the folder. With "0" the folder stays where it is, but nothing that was measured is read or
kept. ``protrain_kernels`` keeps its compiled libraries in the same folder. Models of the Hugging Face Hub lie in the
cache of transformers.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from pathlib import Path

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")  # the configuration, and the files of tokenizers
_WEIGHTS = "*.safetensors"
_LEFT_OUT = ("*/*", "consolidated*")  # other formats, and the weights once more


def cache_folder() -> Path:
    """``$PROTRAIN_CACHE`` where it names a folder, else ``$XDG_CACHE_HOME/protrain`` or ``~/.cache/protrain``."""
    named = os.environ.get("PROTRAIN_CACHE", "")
    if named not in ("", "0", "1"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "protrain"


def keeps_measurements() -> bool:
    """Whether measurements may be kept and used again. ``PROTRAIN_CACHE=0`` says no."""
    return os.environ.get("PROTRAIN_CACHE") != "0"


@functools.cache
def say_unwritable(folder: Path, reason: str) -> None:
    """Warn once that nothing can be kept in ``folder``."""
    warnings.warn(
        f"{folder} cannot be written ({reason}), so everything is measured again in every run: let "
        "PROTRAIN_CACHE name a folder that can be written",
        RuntimeWarning,
        stacklevel=3,
    )


def on_disk(name: str, *, weights: bool) -> str:
    """``name`` itself if it is a path here, otherwise the folder of the model that has this name on the Hub.

    What the cache lacks of the model is downloaded. The folder is that of one revision. So a run that notes the folder
    goes on with the weights that it began with, whatever the Hub has by then.

    Args:
        name: a path, or a name on the Hub. Other names stay as they are.
        weights: whether the folder must have the weights, too.

    Raises:
        ValueError: ``name`` can only be a name on the Hub, and the Hub does not give such a model.
    """
    if not _NAME.fullmatch(name) or os.path.exists(name):
        return name
    wanted = [*_DESCRIPTION, _WEIGHTS] if weights else list(_DESCRIPTION)
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(name, allow_patterns=wanted, ignore_patterns=list(_LEFT_OUT)))
    except ImportError:
        reason = "the package huggingface_hub is missing: pip install 'protrain[hf]'"
    except Exception as error:  # errors of the network, of access rights and of the disk have no common class
        reason = str(error).strip().partition("\n")[0]
    raise ValueError(f"there is no folder {name}, and the Hugging Face Hub does not give a model {name!r}: {reason}")
