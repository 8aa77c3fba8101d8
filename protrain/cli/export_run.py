"""What `protrain export` and `protrain convert` do: a checkpoint becomes a Hugging Face folder, or one of DCP."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from protrain.checkpoint.adapters import Base
from protrain.checkpoint.export import export_save
from protrain.checkpoint.loading import check_checkpoint
from protrain.checkpoint.manifest import find_save, read_manifest
from protrain.cli.job import TrainJob
from protrain.cli.models import read_architecture, read_codec
from protrain.cli.run_files import JOB_FILE, saves_of
from protrain.cli.trained import choose_trained
from protrain.common.hub import on_disk
from protrain.common.parameters import DTYPES
from protrain.common.progress import stage
from protrain.distributed.ranks import Ranks


def export(args: argparse.Namespace) -> None:
    """Run `protrain export`."""
    source, lora = args.checkpoint, args.lora
    name = args.model and on_disk(args.model, weights=args.merge)
    if (source / JOB_FILE).exists():
        job = TrainJob.load(source / JOB_FILE)
        name, lora = name or job.model, lora or job.lora
    save = find_save(saves_of(source))
    if name is None:
        raise ValueError(f"--model: {source} is not the folder of a run, so give the model that was trained")
    manifest, architecture = read_manifest(save), choose_trained(read_architecture(name), lora, ())
    check_checkpoint(save, architecture.model, _base(manifest, architecture.folder, merge=args.merge))
    tokenizer = None if architecture.folder is None else read_codec(architecture.folder).tokenizer
    with stage(f"writing {args.folder}"):
        export_save(
            save,
            manifest,
            architecture.model,
            args.folder,
            dtype=DTYPES[args.dtype or manifest["dtype"]],
            tokenizer=tokenizer,
            merge=args.merge,
            base=architecture.folder,
        )


def _base(manifest: dict[str, Any], folder: Path | None, *, merge: bool) -> Base | None:
    """The base whose weights the save leaves out and ``merge`` reads. The adapter alone needs none of them."""
    if "base" not in manifest or (merge and folder is None):
        return None
    return Base.of(folder, Ranks(None)) if merge and folder else Base.from_dict(manifest["base"])


def convert(args: argparse.Namespace) -> None:
    """Run `protrain convert`."""
    import protrain.checkpoint.dcp as dcp  # no other command should wait for torch's checkpoints to be imported

    with stage(f"converting {args.source}"):
        written = dcp.convert(saves_of(args.source), args.target)
    print(written)
