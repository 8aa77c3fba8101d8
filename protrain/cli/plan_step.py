"""The training step that `protrain plan` plans for, as the options and the type of the device decide it."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any, Self

from protrain.cli.shapes import describe
from protrain.common.cache import on_disk
from protrain.common.dtypes import default_dtype


@dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """All that decides what a trace of the step counts, apart from the code that traces it."""

    model: str  # a shape, or the folder of a model
    layers: int | None  # the number of its blocks; None means its own
    lora: str | None
    load_in_4bit: bool
    freeze: tuple[str, ...]
    batch: int
    sequence: int | None  # tokens; None means the model's default
    packing: bool  # whether sequences hold several examples, so that attention needs a mask
    device_type: str  # "cuda" or "cpu"
    dtype: str  # of the weights
    compile: bool
    chunked_loss: bool | None  # None: where it is known to be the same loss

    @classmethod
    def of(cls, args: argparse.Namespace, device_type: str) -> Self:
        """The step that ``args`` ask for on a device of ``device_type``, of one sequence if they leave the batch open.

        Raises:
            ValueError: the weights are quantised and there is no adapter to train, or the Hub does not give the
                model.
        """
        if args.load_in_4bit and args.lora is None:
            raise ValueError(
                "--load-in-4bit freezes the weights of the model: add an adapter to train, like --lora r=16"
            )
        return cls(
            model=on_disk(args.model, weights=False),
            layers=None,
            lora=args.lora,
            load_in_4bit=args.load_in_4bit,
            freeze=tuple(args.freeze),
            batch=args.batch or 1,
            sequence=args.sequence,
            packing=args.packing,
            device_type=device_type,
            dtype=args.dtype or default_dtype(device_type),
            compile=device_type == "cuda" if args.compile is None else args.compile,
            chunked_loss=args.chunked_loss,
        )

    def description(self) -> dict[str, Any]:
        """The step with what MODEL stands for now, as a folder may change."""
        return {**asdict(self), "model": describe(self.model, layers=self.layers)}
