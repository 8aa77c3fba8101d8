"""What `protrain export` and `protrain convert` do: a checkpoint becomes a Hugging Face folder, or one of DCP."""

from __future__ import annotations

import argparse
from pathlib import Path

from protrain.checkpoint.export import export_save
from protrain.checkpoint.manifest import STATES, find_save
from protrain.cli.models import read_architecture
from protrain.cli.trained import choose_trained
from protrain.common.cache import on_disk
from protrain.common.parameters import DTYPES
from protrain.common.progress import stage


def export(args: argparse.Namespace) -> None:
    """Run `protrain export`."""
    save = find_save(_saves_of(args.checkpoint))
    architecture = choose_trained(read_architecture(on_disk(args.model, weights=False)), args.lora, ())
    folder = architecture.folder
    tokenizer = None
    if folder is not None and any(folder.glob("tokenizer*")):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with stage(f"writing {args.folder}"):
        export_save(
            save,
            architecture.model,
            args.folder,
            dtype=DTYPES[args.dtype] if args.dtype else None,
            tokenizer=tokenizer,
        )


def convert(args: argparse.Namespace) -> None:
    """Run `protrain convert`."""
    import protrain.checkpoint.dcp as dcp  # no other command should wait for torch's checkpoints to be imported

    with stage(f"converting {args.source}"):
        written = dcp.convert(_saves_of(args.source), args.target)
    print(written)


def _saves_of(folder: Path) -> Path:
    """The saves in ``folder``: its own, those of a Trainer's checkpoint, or of the newest one of a Trainer's run."""
    newest = sorted(folder.glob(f"checkpoint-*/{STATES}"), key=lambda path: int(path.parent.name.rpartition("-")[2]))
    return next((each for each in (folder / STATES, *reversed(newest)) if each.is_dir()), folder)
