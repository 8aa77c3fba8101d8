"""What `protrain train` does: it chooses the run's folder and its job, and trains in as many processes as GPUs."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
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
from protrain.cli.summary import TrainSummary
from protrain.common.hub import on_disk
from protrain.common.progress import heard, note
from protrain.common.signals import StopRequests, stop_requests
from protrain.common.tables import wrapped
from protrain.distributed.joining import join, local_rank
from protrain.distributed.ranks import Ranks


def run(args: argparse.Namespace) -> None:
    """Run `protrain train`, in as many processes as GPUs are to be used.

    Raises:
        SystemExit: processes that this one has started have ended, with their status; or this is one of several, and
            another has failed.
    """
    name = getattr(args, "model", "")
    if not (args.resume or name) and args.folder is not None:
        args.resume = jobs.is_run(args.folder)
        if not args.resume:
            raise ValueError(
                f"--folder {args.folder} holds no run to go on with: for a new one give --model, such as --model tiny"
            )
    if args.resume and args.folder is None:
        raise ValueError("--resume needs the --folder of the run")
    if not args.resume and name:
        # Downloads take longer than ranks wait for each other, so they come before there are any. Without data the run
        # is refused, and weights would be in vain.
        args.model = on_disk(name, weights=hasattr(args, "data") and not hasattr(args, "from_scratch"))
        if hasattr(args, "data"):
            with heard(local_rank() == 0):
                args.data = data_on_disk(args.data)
    if launched(args):
        return
    with stop_requests() as requests, together():
        new = f"{Path(name).name}-{time.strftime('%Y%m%d-%H%M%S')}"
        _train(args, args.folder or Path("runs", new), requests, join(None))


def _train(args: argparse.Namespace, named: Path, requests: StopRequests, ranks: Ranks) -> None:
    """Train as one of ``ranks``, in the folder ``named``. The first one decides what to do, and has the folder."""
    given = {name: value for name, value in vars(args).items() if name in TrainJob.__dataclass_fields__}
    first = ranks.rank == 0
    claim = claimed(named, new=args.folder is None) if first else nullcontext(Path())
    with claim as own:
        folder = ranks.of_first(own)
        decided: Any = _job(args, folder, given) if first else None
        job, summary = ranks.of_first(decided)
        if summary is not None:
            note(f"nothing to resume: all {job.steps} steps of {folder} are done")
        else:
            summary = train(job, folder, requests, trace=args.trace)
    if first:
        files = ", ".join(sorted(path.name for path in folder.glob("[!.]*")))
        lines = [wrapped(line, indent="  ") for line in (f"in {folder}: {files}", summary.last_line())]
        emit(summary, args, "\n".join([summary.table(), "", *lines]))


def _job(args: argparse.Namespace, folder: Path, given: dict[str, Any]) -> tuple[TrainJob, TrainSummary | None]:
    """The job, and its summary if it is done already."""
    job = (jobs.resume if args.resume else jobs.start)(folder, given)
    done = folder / SUMMARY_FILE
    if done.exists() and (summary := TrainSummary.load(done)).steps == job.steps:
        return job, summary
    return job, None
