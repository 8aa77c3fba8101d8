"""What a run leaves in its folder, by name."""

from __future__ import annotations

JOB_FILE = "job.json"  # what makes a folder that of a run
PLAN_FILE = "plan.json"
DATA_FOLDER = "data"  # tokens
CHECKPOINTS = "checkpoints"
METRICS_FILE = "metrics.jsonl"
MODEL_FOLDER = "model"
SAMPLE_FILE = "sample.txt"
CURVE_FILE = "loss.png"
SUMMARY_FILE = "summary.json"  # the last that a run writes
RESULTS = (
    *(JOB_FILE, PLAN_FILE, DATA_FOLDER, CHECKPOINTS, METRICS_FILE),
    *(MODEL_FOLDER, SAMPLE_FILE, CURVE_FILE, SUMMARY_FILE),
)

# Hidden, so that neither text nor lists of results hold them. Killed processes leave them; they are in nobody's way.
LOCK_FILE = ".lock"
UNFINISHED_DATA = f".{DATA_FOLDER}.tmp"  # the tokens of a start, until there is a run
