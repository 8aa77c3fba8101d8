"""How many processes there are, and how one finds the others, as a process group or a launcher says.

They meet in the group that is given, in the default group, or in one that a launcher announces.
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from protrain.common.errors import MisuseError, warn_user
from protrain.distributed.ranks import Communicators, Ranks, announced
from protrain.distributed.watch import WARN_S

CONNECT = timedelta(seconds=15)  # how long torch tries to reach a store, which it does twice, and rests between
_FIRST_PORT, _PORTS = 20_000, 10_000  # those that job steps of SLURM take in turn


def join(group: dist.ProcessGroup | None) -> Ranks:
    """The ranks that train together.

    They are those of ``group``, or of the default group. If there is neither and a launcher such as torchrun announces
    several processes, a default group is started with them, and ended when Python ends.
    """
    starts = group is None and announced_processes() > 1 and not dist.is_initialized()
    if starts:
        start_group()
    if group is None and announced_processes() > 1:
        group = dist.group.WORLD
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    ranks = Ranks(group)
    if starts:
        atexit.register(_end_group, ranks)
    return ranks


def check_group(group: object) -> None:
    """Raise a ValueError if ``group`` is no process group that this process belongs to."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process does not belong to process_group: call protrain.wrap in its members alone")
    raise ValueError(
        f"process_group must be a torch.distributed.ProcessGroup, not a {type(group).__name__}. Of a device mesh pass "
        "the group of one dimension, mesh[name].get_group(): ProTrain shards over one group, without replicas (HSDP) "
        "and without tensor, context or pipeline parallelism in other dimensions"
    )


def start_group() -> None:
    """Start the default group with the processes that a launcher announces, and the watch of its ranks before that.

    NCCL, where there are GPUs, begins with its first tensor, so a training on CPUs never meets it.

    Raises:
        ValueError: it is not announced where they meet.
    """
    size = announced_processes()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        if name not in os.environ:
            raise ValueError(
                f"WORLD_SIZE announces {size} processes and {name} is missing, without which they cannot find each "
                "other: start them with torchrun, or call torch.distributed.init_process_group before protrain.wrap"
            )
    rank, timeout = int(os.environ["RANK"]), dist.default_pg_timeout
    # torchrun may give processes that it starts again the store of before, which tells of processes that are dead.
    attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = dist.PrefixStore(attempt, _store(rank, timeout))
    communicators = Communicators(rank, range(size), store, timeout)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    start = partial(dist.init_process_group, backend, store=store, rank=rank, world_size=size)
    communicators.watch.during("the start of the process group", start)
    communicators.serve(dist.distributed_c10d._get_default_group())


def _store(rank: int, timeout: timedelta) -> dist.Store:
    """The store in which the processes meet. The launcher has it before they start, or else rank 0 opens it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launcher_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    end_s = monotonic() + timeout.total_seconds()
    while True:
        try:
            store = dist.TCPStore(
                host,
                port,
                is_master=rank == 0 and not launcher_has_it,
                timeout=CONNECT,
                wait_for_workers=False,  # the watcher waits for them
                multi_tenant=not launcher_has_it,
            )
            store.set_timeout(timeout)
            return store
        except dist.DistNetworkError:
            if rank == 0 or launcher_has_it or monotonic() > end_s:
                raise
            warn_user(f"rank {rank} has waited {WARN_S:.0f} s for rank 0 to open {host}, port {port}")


def _end_group(ranks: Ranks) -> None:
    """End the default group, unless it is ended, or an error ends this process: others may be gone by then."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        ranks.watch.end()
        dist.destroy_process_group()


def refuse_others(ranks: Ranks, processes: int) -> None:
    """MisuseError if other processes have come, or another wrapper trains with them, since the model was wrapped.

    ``processes`` is how many there were then.
    """
    now = announced_processes()
    if now != processes:
        raise MisuseError(
            f"the model was wrapped as one of {processes} processes, and now there are {now}, which it knows nothing "
            "of: start the process group before protrain.wrap, which then trains with all of them"
        )
    if ranks.several and DistributedDataParallel._get_active_ddp_module() is not None:
        raise MisuseError(
            "the wrapped model runs inside DistributedDataParallel, which would wait for gradients that it never gets: "
            "call the model itself, as protrain.wrap reduces gradients over all ranks"
        )


def announced_processes() -> int:
    """The number of processes that train: of the default group, or that the environment announces (torchrun)."""
    has_group = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if has_group else announced("WORLD_SIZE", 1)


def own_store() -> Any:
    """The store in which the processes of the default group meet, by a connection of its own.

    Where a thread waits for others in a store, as at the start of a process group, further threads that use the same
    connection wait as well. Where the process with the store was killed, a DistError is raised within a minute, and not
    after the timeout of the group.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    timeout = store.timeout
    store.set_timeout(CONNECT)
    try:
        return store.clone()
    finally:
        store.set_timeout(timeout)


def local_rank() -> int:
    """The number of this process among those of its node, which is the number of its GPU."""
    return announced("LOCAL_RANK", 0)


def local_processes() -> int:
    """The number of processes on this node, which share its host memory and its cores."""
    return announced("LOCAL_WORLD_SIZE", announced_processes())


def nodes_of(processes: int) -> int:
    """The number of machines that so many processes are on, if each has as many as this one."""
    return -(-processes // local_processes())


def announced_by_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set for this task of a SLURM job step.

    They are none if a launcher has set its own already, or if this is no task of a step of several: a batch script has
    the number of its tasks too, but runs once. The first task of a step runs on the first node of its list, which
    scontrol can name. Where there is no scontrol, the node that launched the step is taken for it.
    """
    tasks = environment.get("SLURM_NTASKS", "1")
    if "WORLD_SIZE" in environment or "SLURM_STEP_ID" not in environment or tasks == "1":
        return {}
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"]  # such as 4(x2),2
    found = re.findall(r"(\d+)(\(x(\d+)\))?", counts)
    per_node = [int(count) for count, _, times in found for _ in range(int(times or 1))]
    step = int(environment.get("SLURM_JOB_ID", "0")) * 31 + int(environment["SLURM_STEP_ID"])
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node[int(environment.get("SLURM_NODEID", "0"))]),
        "MASTER_ADDR": "127.0.0.1" if len(per_node) == 1 else _first_node(environment),
        "MASTER_PORT": str(_FIRST_PORT + step % _PORTS),
    }
    return {name: environment.get(name, value) for name, value in variables.items()}


def _first_node(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        listed = []
    if not listed and "SLURM_LAUNCH_NODE_IPADDR" not in environment:
        raise ValueError(
            "SLURM does not say where the first task runs, as there is neither scontrol nor SLURM_LAUNCH_NODE_IPADDR: "
            "set MASTER_ADDR to the first node, for example by srun --export=ALL,MASTER_ADDR=node1"
        )
    return listed[0] if listed else environment["SLURM_LAUNCH_NODE_IPADDR"]
