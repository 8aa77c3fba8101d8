"""Datasets of the Hugging Face Hub by their names: --data org/name, or org/name/folder for a part of one.

A dataset is read as a folder on the disk is, which is that of one revision in the cache. So which of its rows are
trained on, and what they hold, is found in one way. A run notes the folder, and resumes with the same rows.
"""

from __future__ import annotations

from pathlib import Path

from protrain.cli.sources import BINARY_ROW_FORMATS, ROW_FORMATS, says_train
from protrain.common.hub import files_of_dataset, in_dataset, snapshot
from protrain.common.progress import note
from protrain.common.tables import format_bytes

_FORMATS = (*BINARY_ROW_FORMATS, *ROW_FORMATS, ".txt")
_MOST_NAMED = 10


def data_on_disk(name: str) -> str:
    """``name`` itself if it is a path here, otherwise the folder of the dataset that has this name on the Hub.

    What the cache lacks of its rows and texts is downloaded, after a line that says how much that is. Without a network
    what the cache has is taken.

    Args:
        name: a path, or a name on the Hub, perhaps with a folder behind it. Other names stay as they are.

    Raises:
        ValueError: ``name`` can only be a name on the Hub, and the Hub does not give such a dataset; or it has no files
            that training reads, or several parts of which one is to be named.
    """
    found = in_dataset(name)
    if found is None:
        return name
    repository, folder = found
    patterns = [f"{folder}/*{ending}" if folder else f"*{ending}" for ending in _FORMATS]
    listed = files_of_dataset(repository, patterns)
    if listed is not None:
        _check([Path(file.filename) for file in listed], repository, folder)
        missing = [file for file in listed if file.will_download]
        size = format_bytes(sum(file.file_size or 0 for file in missing))
        if missing:
            note(f"downloading {len(missing)} files, {size}, of the dataset {repository}")
    try:
        root = Path(snapshot(repository, "dataset", allow_patterns=patterns))
    except ValueError as error:
        raise ValueError(
            f"--data: {error}; where there is a network, {_by_hand(repository)} brings it to a folder"
        ) from None
    if listed is None:
        note(f"the Hub cannot be reached, so what the cache has of the dataset {repository} is read")
        files = [file.relative_to(root) for file in sorted((root / folder).rglob("*")) if file.is_file()]
        _check([file for file in files if file.suffix in _FORMATS], repository, folder)
    return str(root / folder)


def _check(files: list[Path], repository: str, folder: str) -> None:
    """Raise a ValueError if there are no ``files``, or they are those of several parts and no ``folder`` is named."""
    if not files:
        formats = ", ".join(_FORMATS)
        place = f"the folder {folder} of the dataset {repository}" if folder else f"the dataset {repository}"
        raise ValueError(f"--data: {place} has no file that training reads ({formats}): give another dataset or folder")
    rows = [file for file in files if file.suffix != ".txt"]
    folders = sorted({str(file.parent) for file in [file for file in rows if says_train(file)] or rows})
    if len(folders) > 1 and not folder:
        more = f" and {len(folders) - _MOST_NAMED} more" if len(folders) > _MOST_NAMED else ""
        raise ValueError(
            f"--data: the dataset {repository} has rows in the folders {', '.join(folders[:_MOST_NAMED])}{more}: name "
            f"one of them, like --data {repository}/{folders[-1]}, or bring all to a folder by {_by_hand(repository)}"
        )


def _by_hand(repository: str) -> str:
    return f"`hf download {repository} --repo-type dataset --local-dir FOLDER`"
