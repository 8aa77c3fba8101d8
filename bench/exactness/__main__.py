"""Trains one model several times, on numbers of GPUs and within memories that differ, and compares every bit.

python -m bench.exactness --model llama-1b --device-memory 6GiB --gpus 4 --batch 2 --out exactness.json

A step has --gpus micro-batches in every training: one GPU takes them one after another, several share them. Losses of
all micro-batches, norms and, at the end, every master and moment must agree. Deterministic algorithms are on, because
the usual attention backward adds with atomics and differs from run to run whatever the plan.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.exactness.worker import Training
from bench.train.options import Sizes, add_sizes, commit_of_checkout, sizes_of, versions
from bench.train.ranks import run_ranks
from bench.train.task import Task, make_tokens
from protrain.cli.options import number, result_file
from protrain.common.records import Record
from protrain.common.tables import aligned, format_bytes, format_ms

_SIZES = Sizes(model="llama-1b", batch=2, sequence=2048, steps=8, warm_up=2)


@dataclass(frozen=True, kw_only=True)
class Exactness(Record):
    """All trainings of one run."""

    command: str
    commit: str
    versions: dict[str, str]
    task: Task
    trainings: tuple[Training, ...]

    @property
    def same(self) -> bool:
        """Whether all trainings have the same bits."""
        return len({(one.losses, one.norms, one.checksum) for one in self.trainings}) == 1

    def table(self) -> str:
        """The trainings as text."""
        rows = [["GPUs", "memory of each", "plan", "step", "device", "host", "last loss", "checksum"]]
        for one in self.trainings:
            sizes = format_bytes(one.device_bytes), format_bytes(one.host_bytes)
            how = str(one.gpus), one.device_memory or "all", one.plan, format_ms(one.step_ms)
            rows.append([*how, *sizes, repr(one.losses[-1]), one.checksum])
        return aligned(rows) + ("\nevery bit agrees" if self.same else "\nNOT THE SAME BITS")


def main(argv: Sequence[str] | None = None) -> int:
    """Run all trainings, print and write the record; exit status 1 when a bit differs."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=__doc__.rpartition("\n\n")[2])
    add_sizes(parser, _SIZES)
    parser.add_argument("--host-memory", default=None, metavar="SIZE", help="of the machine")
    parser.add_argument("--clip", type=number(float, 0), default=1.0, metavar="NORM", help="(default: %(default)s)")
    parser.add_argument("--out", type=result_file, default=None, metavar="FILE", help="for the record")
    args = parser.parse_args(arguments)
    if args.gpus & (args.gpus - 1):
        parser.error("--gpus must be a power of two: the mean over another number of GPUs is not exact")
    try:
        task = Task(**sizes_of(args, _SIZES), host_memory=args.host_memory, clip_norm=args.clip)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    memories = (None,) if task.device_memory is None else (None, task.device_memory)
    numbers = [1 << power for power in range(task.gpus.bit_length())]
    with tempfile.TemporaryDirectory() as folder:
        task_file, tokens, out = (Path(folder, name) for name in ("task.json", "tokens.pt", "training.json"))
        task.save(task_file)
        make_tokens(task, tokens)
        trainings = []
        for gpus in numbers:
            for device_memory in memories:
                Training(gpus=gpus, device_memory=device_memory).save(out)
                command = [sys.executable, "-m", "bench.exactness.worker", task_file, tokens, out]
                where = f"{gpus} GPUs, {device_memory or 'all memory'}"
                status = run_ranks([str(each) for each in command], gpus)
                if status:
                    print(f"{parser.prog}: the training on {where} failed", file=sys.stderr)
                    return status
                trainings.append(Training.load(out))
                print(f"{where}: last loss {trainings[-1].losses[-1]!r}, {trainings[-1].checksum}", flush=True)
    record = Exactness(
        command=f"python -m bench.exactness {shlex.join(arguments)}",
        commit=commit_of_checkout(),
        versions=versions(),
        task=task,
        trainings=tuple(trainings),
    )
    print(record.table())
    if args.out is not None:
        record.save(args.out)
    return 0 if record.same else 1


if __name__ == "__main__":
    sys.exit(main())
