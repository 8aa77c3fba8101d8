"""`protrain calibrate`: measures this machine."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import protrain
from protrain.cli.launch import add_gpus_option, launched
from protrain.cli.options import Parser, add_output_options, emit, number
from protrain.cli.prepare import own_device
from protrain.cli.signals import stop_requests
from protrain.cli.together import together
from protrain.common.progress import Progress, say
from protrain.hardware.cache import Machine, cached
from protrain.hardware.calibration import FULL_SECONDS, calibrate_twice, differences, report
from protrain.hardware.profile import HardwareProfile
from protrain_kernels.cache_folder import keeps_measurements

_EXAMPLE = """example:
  protrain calibrate --out machine.json
  protrain plan llama2-13b --hardware machine.json

on four GPUs at once, with what they gather and exchange:
  protrain calibrate --gpus 4
"""
_DESCRIPTION = """Measure what the machine's device, link and host can do, alone and together, in under a minute.

The profile is kept in $PROTRAIN_CACHE, $XDG_CACHE_HOME/protrain or ~/.cache/protrain. Training and planning on this
machine then use it. Close other programs first."""


def add_command(commands: Any, summary: str) -> None:
    """Add `calibrate` to the subparsers ``commands``, whose help has the line ``summary``."""
    parser: Parser = commands.add_parser("calibrate", help=summary, description=_DESCRIPTION, epilog=_EXAMPLE)
    add_gpus_option(parser, "measure")
    parser.add_argument("--device", default=None, help="cuda or cpu (default: cuda when there is one)")
    parser.add_argument(
        "--seconds",
        type=number(0, 600, open_ended=True),
        default=FULL_SECONDS,
        help="how long to measure; less also means smaller sizes and rougher figures (default: %(default)g)",
    )
    parser.add_argument(
        "--repeat-check",
        action="store_true",
        default=False,
        help="measure twice and print the figures that differ by more than 5%%",
    )
    add_output_options(parser)
    parser.set_defaults(run=run_command)


def run_command(args: argparse.Namespace) -> None:
    """Run `protrain calibrate`, in as many processes as GPUs are to be measured."""
    if launched(args):
        return
    with stop_requests() as requests, together() as processes, requests.raised():
        _calibrate(args, speaks=processes.rank == 0)


def _calibrate(args: argparse.Namespace, *, speaks: bool) -> None:
    device = own_device(args.device)
    with Progress(enabled=speaks).bar("measuring") as progress:
        if args.repeat_check:
            before, hardware = calibrate_twice(device, seconds=args.seconds, progress=progress)
        else:
            hardware = protrain.calibrate(device, seconds=args.seconds, progress=progress)
    if not speaks:
        return
    emit(hardware, args, report(hardware))
    if args.repeat_check:
        say(f"protrain: {_repeated(differences(before, hardware))}")
    say(f"protrain: {_kept(hardware, device)}")


def _repeated(lines: list[str]) -> str:
    if not lines:
        return "both runs agree within 5% on every figure"
    return "\n  ".join((f"the two runs differ by more than 5% in {len(lines)} figures:", *lines))


def _kept(hardware: HardwareProfile, device: torch.device) -> str:
    if cached(device) != hardware:
        if not keeps_measurements():
            return "the profile was not kept, as PROTRAIN_CACHE=0 says"
        return f"the profile was not kept: {Machine.of(device).path} cannot be written; PROTRAIN_CACHE names the folder"
    return f"kept in {Machine.of(device).path}"
