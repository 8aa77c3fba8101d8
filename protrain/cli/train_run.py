"""What `protrain train` does: it chooses the run's folder and its job, and trains in as many processes as GPUs."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from protrain.cli import job as jobs
from protrain.cli.folder_lock import claimed
from protrain.cli.hub_data import data_on_disk
from protrain.cli.job import TrainJob
from protrain.cli.launch import launched, together
from protrain.cli.loop import train
from protrain.cli.options import emit
from protrain.cli.run_files import SUMMARY_FILE
from protrain.cli.signals import StopRequests, stop_requests
from protrain.cli.summary import TrainSummary
from protrain.common.hub import on_disk
from protrain.common.progress import heard, note
from protrain.common.tables import wrapped
from protrain.distributed.joining import join
from protrain.distributed.processes import local_rank
from protrain.distributed.ranks import Ranks


def run(args: argparse.Namespace) -> None:
    """Run `protrain train`, in as many processes as GPUs are to be used.

    Raises:
        SystemExit: processes that this one has started have ended, with their status; or this is one of several, and
            another has failed.
    """
    if not args.resume and not hasattr(args, "model") and args.folder is not None:
        args.resume = jobs.is_run(args.folder)
        if not args.resume:
            raise ValueError(
                f"--folder {args.folder} holds no run to go on with: for a new one give --model, such as --model tiny"
            )
    if args.resume and args.folder is None:
        raise ValueError("--resume needs the --folder of the run")
    name = getattr(args, "model", "")
    if not args.resume and name:
        # Downloads take longer than ranks wait for each other, so they come before there are any.
        args.model = on_disk(name, weights=not getattr(args, "from_scratch", False))
        if getattr(args, "data", None) is not None:
            with heard(local_rank() == 0):
                args.data = data_on_disk(args.data)
    if launched(args):
        return
    with stop_requests() as requests, together():
        _train(args, args.folder or _new_folder(name), requests, join(None))


def _train(args: argparse.Namespace, named: Path, requests: StopRequests, ranks: Ranks) -> None:
    """Train as one of ``ranks``, in the folder ``named``. The first one decides what to do, and has the folder."""
    names = {field.name for field in fields(TrainJob)}
    given = {name: value for name, value in vars(args).items() if name in names}
    first = ranks.rank == 0
    claim = claimed(named, new=args.folder is None) if first else nullcontext(Path())
    with claim as own:
        folder = ranks.of_first(own)
        decided = ranks.of_first(_job(args, folder, given) if first else None)
        assert decided is not None, "the first has decided"
        job, summary = decided
        if summary is not None:
            note(f"nothing to resume: all {job.steps} steps of {folder} are done")
        else:
            summary = train(job, folder, requests, resume=args.resume, trace=args.trace)
    if first:
        files = ", ".join(sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")))
        lines = [wrapped(line, indent="  ") for line in (f"in {folder}: {files}", summary.last_line())]
        emit(summary, args, "\n".join([summary.table(), "", *lines]))


def _job(args: argparse.Namespace, folder: Path, given: dict[str, Any]) -> tuple[TrainJob, TrainSummary | None]:
    """The job, and its summary if it is done already."""
    if not args.resume:
        return jobs.start(folder, given), None
    job, done = jobs.resume(folder, given), folder / SUMMARY_FILE
    summary = TrainSummary.load(done) if done.exists() else None
    return job, summary if summary is not None and summary.steps == job.steps else None


def _new_folder(model: str) -> Path:
    return Path("runs") / f"{Path(model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
