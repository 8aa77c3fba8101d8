"""How many processes there are, and which of them this is, as a process group or a launcher says."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_FIRST_PORT, _PORTS = 20_000, 10_000  # those that job steps of SLURM take in turn
CONNECT = timedelta(seconds=15)  # how long torch tries to reach a store, which it does twice, and rests between


def announced_processes() -> int:
    """The number of processes that train: of the default group, or that the environment announces (torchrun)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _announced("WORLD_SIZE", 1)


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
    return _announced("LOCAL_RANK", 0)


def local_processes() -> int:
    """The number of processes on this node, which share its host memory and its cores."""
    return _announced("LOCAL_WORLD_SIZE", announced_processes())


def _announced(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else default


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
    per_node = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"])
    node = int(environment.get("SLURM_NODEID", "0"))
    step = int(environment.get("SLURM_JOB_ID", "0")) * 31 + int(environment["SLURM_STEP_ID"])
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "MASTER_ADDR": "127.0.0.1" if len(per_node) == 1 else _first_node(environment),
        "MASTER_PORT": str(_FIRST_PORT + step % _PORTS),
    }
    return {name: environment.get(name, value) for name, value in found.items()}


def _tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, of a text such as ``4(x2),2``."""
    found = re.findall(r"(\d+)(\(x(\d+)\))?", text)
    return [int(count) for count, _, times in found for _ in range(int(times or 1))]


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
