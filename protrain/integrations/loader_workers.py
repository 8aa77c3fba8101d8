"""Workers of a loader that outlive the signals that tell their training to stop.

torchrun and terminals send a signal to a whole group of processes. The training ends its step all the same, for which
it may need more batches, and torch raises an error in it as soon as a signal has killed a worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from signal import SIG_BLOCK, SIG_IGN, SIGHUP, SIGINT, SIGTERM, pthread_sigmask, signal, sigwaitinfo
from threading import Thread
from typing import Any


def let_workers_stay(loader: Any) -> Any:
    """``loader``, whose workers are ended by the process that has started them, and by no other's signals."""
    own = getattr(loader, "base_dataloader", loader)  # without what Accelerate has put around it
    if getattr(own, "num_workers", 0):
        own.worker_init_fn = partial(_stay, own.worker_init_fn)
    return loader


def _stay(begin: Callable[[int], None] | None, worker: int) -> None:
    """What ``worker`` does first, before what it was to ``begin`` with."""
    for number in (SIGINT, SIGHUP):
        signal(number, SIG_IGN)
    pthread_sigmask(SIG_BLOCK, [SIGTERM])  # by which a training ends a worker that hangs
    Thread(target=_end_with_training, name="protrain-end", daemon=True).start()
    if begin is not None:
        begin(worker)


def _end_with_training() -> None:
    while sigwaitinfo([SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
