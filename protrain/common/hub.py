"""Models and datasets of the Hugging Face Hub, by names like org/model. They lie in the cache of transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FOLDER = re.compile(r"(/[\w-][\w.-]*)*")  # in a repository
_DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")  # the configuration, and the files of tokenizers
_WEIGHTS = "*.safetensors"
_LEFT_OUT = ("*/*", "consolidated*")  # other formats, and the weights once more


def in_dataset(name: str) -> tuple[str, str] | None:
    """The name of a dataset on the Hub and of a folder in it, or "".

    None if ``name`` is a path here, or does not have that form.
    """
    found = _NAME.match(name)
    if found is None or os.path.exists(name) or not _FOLDER.fullmatch(name, found.end()):
        return None
    return found.group(), name[found.end() + 1 :]


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
    return str(snapshot(name, "model", allow_patterns=wanted, ignore_patterns=list(_LEFT_OUT)))


def snapshot(name: str, kind: str, **how: Any) -> Any:
    """What ``snapshot_download`` of huggingface_hub returns for the ``kind`` of repository, "model" or "dataset".

    Raises:
        ValueError: the Hub does not give it, and the cache does not have it.
    """
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(name, repo_type=kind, **how)
    except ImportError:
        reason = "the package huggingface_hub is missing: pip install 'protrain[hf]'"
    except Exception as error:  # errors of the network, of access rights and of the disk have no common class
        reason = str(error).strip().partition("\n")[0]
    raise ValueError(f"there is no folder {name}, and the Hugging Face Hub does not give a {kind} {name!r}: {reason}")


def files_of_dataset(name: str, patterns: Sequence[str]) -> list[Any] | None:
    """The files of a dataset whose names match, with sizes and what of them is missing here. None without the Hub."""
    try:
        return list(snapshot(name, "dataset", allow_patterns=list(patterns), dry_run=True))
    except ValueError:  # without a network; otherwise the download says what is wrong
        return None


def is_of(folder: str, name: str) -> bool:
    """Whether ``folder`` is in the cache, and of the model or dataset on the Hub, or folder in it, that ``name`` is."""
    found, parts = in_dataset(name), Path(folder).parts
    if found is None:
        return False
    repository = found[0].replace("/", "--")
    caches = f"models--{repository}", f"datasets--{repository}"
    at = next((at for at, part in enumerate(parts) if part in caches), None)
    return at is not None and parts[at + 3 :] == Path(found[1]).parts  # behind "snapshots" and the revision


def command_for(folder: str) -> str | None:
    """The command that brings ``folder`` of a dataset to the cache again, or None if it is not one of the cache."""
    parts = Path(folder).parts
    at = next((at for at, part in enumerate(parts) if part.startswith("datasets--")), None)
    if at is None or len(parts) < at + 3:
        return None
    name = parts[at].removeprefix("datasets--").replace("--", "/")
    return f"hf download {name} --repo-type dataset --revision {parts[at + 2]}"
