"""What `protrain train` does: it starts as many processes as GPUs by torchrun, and each of them trains."""

from __future__ import annotations

import argparse
import warnings

from protrain.cli.launch import start_ranks, together
from protrain.cli.options import need


def run(args: argparse.Namespace) -> None:
    """Run `protrain train`.

    Raises:
        ValueError: an option or the data is wrong, or a package is missing.
    """
    need("trl", "`protrain train`", extra="train")
    from protrain.cli.train import parse, train

    warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
    options = parse(args.words[1:])
    start_ranks(options.data.gpus, args.words)
    with together():
        train(options)
