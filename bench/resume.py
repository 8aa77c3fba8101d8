"""Kills a training run with SIGKILL at random moments, resumes it each time, and compares the result with an
undisturbed run.

python bench/resume.py --kills 10

The device budget changes from one resumption to the next, so that plans change too. Every loss and the final weights,
masters and moments must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from protrain.checkpoint.manifest import list_saves
from protrain.cli.options import writable_folder

BUDGETS = ("80MiB", "60MiB", "50MiB")


def main() -> int:
    """Run both, print and write the record; exit status 1 when a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--checkpoint-every", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=writable_folder)
    args = parser.parse_args()
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        whole, broken = Path(scratch) / "whole", Path(scratch) / "broken"
        start(args, whole, budget=BUDGETS[0]).wait()
        killed_at = []
        process = start(args, broken, budget=BUDGETS[0])
        for kill in range(args.kills):
            first = steps_done(broken)
            target = first + random.randint(1, max(1, (args.steps - first) // (args.kills - kill + 1)))
            while steps_done(broken) < target and process.poll() is None:
                time.sleep(0.01)
            time.sleep(random.random() * 0.2)  # anywhere in a step or in a save
            process.kill()
            process.wait()
            killed_at.append(steps_done(broken))
            process = start(args, broken, budget=BUDGETS[(kill + 1) % len(BUDGETS)])
        status = process.wait()
        record = {
            "command": f"python bench/resume.py {' '.join(sys.argv[1:])}",
            "steps": args.steps,
            "checkpoint_every": args.checkpoint_every,
            "killed_at_step": killed_at,
            "finished": status == 0,
            "same_losses": losses(whole) == losses(broken),
            "same_states": states(whole) == states(broken),
        }
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0 if record["same_losses"] and record["same_states"] else 1


def start(args: argparse.Namespace, folder: Path, *, budget: str) -> subprocess.Popen[bytes]:
    """One run of examples/pretrain.py, which goes on where there is a checkpoint."""
    script = Path(__file__).parent.parent / "examples/pretrain.py"
    command = [sys.executable, str(script), "--folder", str(folder), "--device", "cpu", "--device-memory", budget]
    command += ["--steps", str(args.steps), "--save-every", str(args.checkpoint_every)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def steps_done(folder: Path) -> int:
    """The steps of the newest checkpoint."""
    saves = list_saves(folder / "checkpoints") if (folder / "checkpoints").exists() else []
    return int(saves[-1].name.rpartition("-")[2]) if saves else 0


def losses(folder: Path) -> list[float]:
    """The loss of every step."""
    found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


def states(folder: Path) -> dict[str, int]:
    """Checksums of the files of the newest checkpoint."""
    newest = list_saves(folder / "checkpoints")[-1]
    manifest = json.loads((newest / "checkpoint.json").read_text())
    return {name: file["crc32"] for name, file in manifest["files"].items()}


if __name__ == "__main__":
    sys.exit(main())
