"""How much of a step's peak memory a profiler misses that looks only at layers, compared with ours.

python -m bench.planner.layerwise --out bench/results/simulated         GPT-2 10B, on the meta device
python -m bench.planner.layerwise --device cuda --out bench/results/h100

The paper (arXiv 2406.08334, section 4) says that operations between layers, whose memory no layer's hook sees, have
17.2% of the peak of a 10 B GPT-2. Here one plain step runs with hooks before and after every layer (a module without
children), forward and backward, in two modes: every block recomputed, and none. Three views are compared:

layers' ends   what is allocated when a layer begins or ends, forward or backward
in layers      what the view before sees, and the most that is allocated while a layer runs
ours           the memory model's peak, without its margin, from the profile that wrap makes

and the truth: the most that is ever allocated. Weights aside; gradients are dropped as they come. The meta device
counts storages that operations return; a GPU what its allocator hands out, operations' own workspace included.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import protrain
from bench.planner.output import put_out
from protrain.cli.models import read_architecture
from protrain.cli.options import writable_folder
from protrain.cli.summary import device_name, versions
from protrain.common import batch as batches
from protrain.common.records import Record
from protrain.common.tables import aligned, format_bytes
from protrain.hardware.shipped import load
from protrain.planning import MemoryModel, block_modes, pack
from protrain.profiler.blocks import find_blocks
from protrain.profiler.memory_meter import CudaMeter, Meter, StorageMeter
from protrain.profiler.meta_device import as_if_on_gpu

FILE = "layerwise.json"
_DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One mode of one model: bytes at the peak, without weights."""

    mode: str
    true_bytes: int
    ends_bytes: int
    in_layers_bytes: int
    ours_bytes: int

    def missed(self, seen_bytes: int) -> str:
        """The share of the peak that ``seen_bytes`` lack; negative if they are too many."""
        return f"{1 - seen_bytes / self.true_bytes:.1%}"


@dataclass(frozen=True, kw_only=True)
class Table(Record):
    """The whole table."""

    command: str
    device: str
    versions: dict[str, str]
    model: str
    layers: int
    batch: int
    sequence: int
    modes: tuple[Row, ...]

    def table(self) -> str:
        """The table as text."""
        rows = [["blocks", "true peak", "missed at layers' ends", "in layers", "by ours"]]
        for row in self.modes:
            seen = (row.ends_bytes, row.in_layers_bytes, row.ours_bytes)
            rows.append([row.mode, format_bytes(row.true_bytes), *map(row.missed, seen)])
        title = f"{self.model}, {self.layers} layers, batch {self.batch} x {self.sequence}, on {self.device}"
        return "\n".join([title, aligned(rows)])


class LayerView:
    """The memory that hooks on layers read from a meter."""

    def __init__(self, meter: Meter) -> None:
        self.ends_bytes = self.in_layers_bytes = self.true_bytes = 0
        self._meter = meter

    def before(self, *_: Any) -> None:
        """A layer begins."""
        self._look()
        self._meter.reset_peak()

    def after(self, *_: Any) -> None:
        """A layer has ended."""
        self.in_layers_bytes = max(self.in_layers_bytes, self._meter.peak_bytes)
        self._look()

    def _look(self) -> None:
        self.true_bytes = max(self.true_bytes, self._meter.peak_bytes)
        self.ends_bytes = max(self.ends_bytes, self._meter.alive_bytes)
        self.in_layers_bytes = max(self.in_layers_bytes, self.ends_bytes)

    def end(self) -> None:
        """The step has ended."""
        self.true_bytes = max(self.true_bytes, self._meter.peak_bytes)


@contextmanager
def _watched(model: nn.Module, view: LayerView, blocks: list[str], *, recompute: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in model.modules():
            if not any(layer.children()):
                stack.callback(layer.register_forward_pre_hook(view.before).remove)
                stack.callback(layer.register_forward_hook(view.after).remove)
                stack.callback(layer.register_full_backward_pre_hook(view.before).remove)
                stack.callback(layer.register_full_backward_hook(view.after).remove)
        for parameter in model.parameters():
            stack.callback(parameter.register_post_accumulate_grad_hook(_drop_gradient).remove)
        for path in blocks if recompute else ():
            block = model.get_submodule(path)
            stack.callback(block.__dict__.pop, "forward")
            block.__dict__["forward"] = _recomputed(block.forward)
        yield


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def view_step(model: nn.Module, batch: dict[str, Tensor], *, recompute: bool) -> LayerView:
    """One step of ``model``, whose weights are in place, as its layers' hooks see it, and the truth.

    It is the second of a loop that holds what the model returned until it returns the next.
    """
    device = next(model.parameters()).device
    meter = CudaMeter(device) if device.type == "cuda" else StorageMeter()
    meter.ignore((*model.parameters(), *model.buffers()))
    meter.count(batch.values())
    view = LayerView(meter)
    on_meta = as_if_on_gpu() if device.type == "meta" else nullcontext()
    arguments = batches.training_arguments(model, batch)
    with on_meta, meter, set_checkpoint_early_stop(False), warnings.catch_warnings():  # recompute each layer to its end
        warnings.filterwarnings("ignore", message="Full backward hook")  # of the embedding, whose inputs are words
        with torch.no_grad():
            output = model(**arguments)
        with _watched(model, view, find_blocks(model), recompute=recompute):
            meter.reset_peak()
            output = model(**arguments)
            batches.loss_of(output).backward()
            view.end()
    return view


def measure(name: str, *, layers: int | None, batch: int, sequence: int, device: torch.device) -> tuple[int, list[Row]]:
    """The depth and the rows of one model."""
    loaded = read_architecture(name, layers=layers)
    with protrain.empty_parameters():  # the model has no values, only the record of how they are made
        model = loaded.model.to(_DTYPE).train()
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids}
    profile = protrain.profile(model, example, device=device, dtype=_DTYPE)
    memory = MemoryModel(profile, load("h100"), pack(profile))
    if device.type == "cuda":
        model = model.to_empty(device=device)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                torch.nn.init.normal_(tensor, std=0.02)
    example = {key: value.to(device) for key, value in example.items()}
    n_blocks, rows = len(profile.blocks), []
    for mode, n_ckpt in (("recomputed", n_blocks), ("kept", 0)):
        view = view_step(model, example, recompute=n_ckpt > 0)
        rows.append(
            Row(
                mode=mode,
                true_bytes=view.true_bytes,
                ends_bytes=view.ends_bytes,
                in_layers_bytes=view.in_layers_bytes,
                ours_bytes=memory.activations(block_modes(n_blocks, 0, n_ckpt)).peak_bytes,
            )
        )
    return n_blocks, rows


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench.planner.layerwise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-10b")
    parser.add_argument("--layers", type=int, help="(default: the shape's own)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--device", choices=("meta", "cuda"), default="meta", help="(default: meta)")
    parser.add_argument("--out", type=writable_folder, help=f"folder for {FILE}")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    depth, rows = measure(args.model, layers=args.layers, batch=args.batch, sequence=args.sequence, device=device)
    result = Table(
        command=f"python -m bench.planner.layerwise {shlex.join(arguments)}",
        device="the meta device" if args.device == "meta" else device_name(device),
        versions=versions(),
        model=args.model,
        layers=depth,
        batch=args.batch,
        sequence=args.sequence,
        modes=tuple(rows),
    )
    put_out(result, args.out, FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
