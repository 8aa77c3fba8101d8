"""How long it takes to profile a model, also one that is larger than the device.

python -m bench.planner.profile_time --out bench/results/h100

Each model is profiled ``--repeat`` times in a process of its own. The first time is the one that a user waits for:
kernels are loaded, libraries create their handles, and the allocator is empty. Blocks are not compiled.
"""

from __future__ import annotations

import multiprocessing
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

import protrain
from bench.planner.output import repeating, write_out
from protrain.cli.models import read_architecture
from protrain.cli.summary import device_name, versions
from protrain.common.records import Record
from protrain.common.tables import aligned
from protrain.hardware.detection import detect

FILE = "profile_time.json"
GIB = 1024**3
_PIECE_ELEMENTS = 2**24


@dataclass(frozen=True, kw_only=True)
class Asked(Record):
    """A model and the batch that it is profiled with."""

    shape: str
    batch: int
    sequence: int
    on_host: bool  # whether its weights are in host memory, in bf16; otherwise it has no weights yet


PROFILES = tuple(
    Asked(shape=shape, batch=8, sequence=sequence, on_host=on_host)
    for shape, sequence in (("llama-7b", 2048), ("gpt2-20b", 1024))
    for on_host in (False, True)
)
SMOKE = (Asked(shape="tiny", batch=2, sequence=64, on_host=True),)


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """How long the profiles of one model took."""

    asked: Asked
    parameters: int
    weight_bytes: int  # in the dtype of the profile
    profile_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Table(Record):
    """A whole run."""

    command: str
    device: str
    device_bytes: int
    versions: dict[str, str]
    profiled: tuple[Row, ...]

    def table(self) -> str:
        """For the terminal."""
        lines = [("model", "parameters", "batch", "weights", "the first", "later")]
        for row in self.profiled:
            asked = row.asked
            lines.append(
                (
                    asked.shape,
                    f"{row.parameters / 1e9:.2f} B",
                    f"{asked.batch} x {asked.sequence}",
                    f"{row.weight_bytes / GIB:.0f} GiB {'on the host' if asked.on_host else 'to be, none yet'}",
                    f"{row.profile_s[0]:.2f} s",
                    ", ".join(f"{seconds:.2f} s" for seconds in row.profile_s[1:]),
                )
            )
        return f"{aligned(lines)}\n{self.device}, {self.device_bytes / GIB:.0f} GiB"


def profiled(asked: Asked, repeat: int) -> Row:
    """Profile ``repeat`` times in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = read_architecture(asked.shape)
    if asked.on_host:
        _fill(loaded.model)
    ids = torch.randint(loaded.config.vocab_size, (asked.batch, asked.sequence))
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        protrain.profile(loaded.model, {"input_ids": ids, "labels": ids}, device=device, dtype=dtype)
        seconds.append(time.perf_counter() - begin)
    return Row(asked=asked, parameters=parameters, weight_bytes=parameters * dtype.itemsize, profile_s=tuple(seconds))


def _fill(model: nn.Module) -> None:
    """Give the parameters memory and random values. They repeat a short sequence, as drawing billions takes minutes."""
    piece = torch.randn(_PIECE_ELEMENTS).mul_(0.02).bfloat16()
    filled: dict[int, nn.Parameter] = {}  # tied parameters are filled once
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in filled:
                values = torch.empty(parameter.shape, dtype=torch.bfloat16)
                for part in values.view(-1).split(_PIECE_ELEMENTS):
                    part.copy_(piece[: part.numel()])
                filled[id(parameter)] = nn.Parameter(values)
            module._parameters[name] = filled[id(parameter)]


def main(argv: list[str] | None = None, profiles: tuple[Asked, ...] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    args = repeating(arguments, prog="bench.planner.profile_time", about=__doc__, file=FILE, what="profiles", default=3)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print("no GPU here: a tiny model as a check that everything runs; the figures mean nothing", file=sys.stderr)
    rows: list[Row] = []

    def table() -> Table:
        return Table(
            command=f"python -m bench.planner.profile_time {shlex.join(arguments)}",
            device=device_name(device),
            device_bytes=detect(device).device_bytes,
            versions=versions(),
            profiled=tuple(rows),
        )

    for asked in profiles or (PROFILES if device.type == "cuda" else SMOKE):
        print(f"{asked.shape}, {asked.batch} x {asked.sequence}", file=sys.stderr, flush=True)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            rows.append(process.submit(profiled, asked, args.repeat).result())
        print(", ".join(f"{seconds:.2f} s" for seconds in rows[-1].profile_s), file=sys.stderr, flush=True)
        write_out(table(), args.out, FILE)
    print(table().table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
