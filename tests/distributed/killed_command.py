"""`python -m protrain`, of which rank 1 is killed once, at the step in the variable KILLED_AT.

torchrun ... -m tests.distributed.killed_command train ...
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from typing import Any

import protrain.cli.loop as loop
from protrain.cli.main import main
from protrain.cli.training_run import Run

_step = loop._step


def step_or_die(run: Run) -> Any:
    """The next step, unless it is the one in which this rank dies."""
    dies = os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if dies and str(run.step) == os.environ["KILLED_AT"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return _step(run)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100)  # before the test gives up
    loop._step = step_or_die
    sys.exit(main(sys.argv[1:]))
