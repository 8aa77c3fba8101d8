"""What stands for the compiler on the meta device: the graphs that it would compile, run operator by operator.

What a compiled block saves is decided when its forward and backward are told apart, before any code is made. What is
alive between products is decided by which operators are fused; :func:`inside_graph` says where they would be.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_running = 0  # graphs


@functools.cache  # blocks share graphs where they share a backend
def graphs_alone() -> Any:
    """A backend for torch.compile that cuts the graph of a block as its default backend does, and compiles nothing."""
    # The compiler's own modules, which take their time to import.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=_marked,
        bw_compiler=_marked,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def inside_graph() -> bool:
    """Whether what runs is part of such a graph."""
    return _running > 0


def _marked(graph: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.debugging import boxed_nop

    run = boxed_nop(graph, inputs)

    def marked(args: Any) -> Any:
        global _running
        _running += 1
        try:
            results = run(args)
        finally:
            _running -= 1
        torch.empty(0, device="meta")  # an operator outside, for whoever counts what is alive when a graph ends
        return results

    vars(marked)["_boxed_call"] = True
    return marked
