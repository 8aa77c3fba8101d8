"""The names of the files in a run's folder."""

from __future__ import annotations

from pathlib import Path

JOB_FILE = "job.json"  # a folder with this file is a run's
PLAN_FILE = "plan.json"
DATA_FOLDER = "data"  # the tokens
CHECKPOINTS = "checkpoints"
METRICS_FILE = "metrics.jsonl"
MODEL_FOLDER = "model"
SAMPLE_FILE = "sample.txt"
CURVE_FILE = "loss.png"
SUMMARY_FILE = "summary.json"  # the last file that a run writes
TENSORBOARD_FOLDER = "tensorboard"
RESULTS = (
    *(JOB_FILE, PLAN_FILE, DATA_FOLDER, CHECKPOINTS, METRICS_FILE),
    *(MODEL_FOLDER, SAMPLE_FILE, CURVE_FILE, SUMMARY_FILE, TENSORBOARD_FOLDER),
)

# These are hidden, so that they count neither as text nor as results. Killed processes leave them, and they do no harm.
LOCK_FILE = ".lock"
REFUSED_FILE = ".refused"  # a command that was to begin another run here was refused
WANDB_FILE = ".wandb"  # by what name wandb knows the run
UNFINISHED_DATA = f".{DATA_FOLDER}.tmp"  # the tokens, until everything that can be wrong is checked


def saves_of(folder: Path) -> Path:
    """The folder of the checkpoints of ``folder``, which may be a run, or such a folder itself."""
    return folder / CHECKPOINTS if (folder / JOB_FILE).exists() else folder
