"""What one block takes: what its plain forward saves and computes, its inputs, and how long the model holds these.

The plain forward is measured apart from the traced step, which recomputes every block from its inputs.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from typing_extensions import override

from protrain.common.parameters import is_plain
from protrain.common.trees import copied_cache, is_cache, map_leaves, tensors_in, tensors_of_cache
from protrain.forward.compilation import eager_of, graphs_compiled
from protrain.forward.module_state import BlockModules, RandomState
from protrain.forward.recomputation import Recomputation
from protrain.profiler.operations import Operations, allocated_bytes, memory_in, storage_key, storages_in
from protrain.profiler.stand_in_weights import StandInWeights, Uses


class BlockInputs:
    """Tells inputs that only checkpoints keep from inputs that the model holds too, as in a list of hidden states.

    While the step is measured, a checkpoint keeps one tensor object for each tensor that it was given. So if more
    tensors share a storage than blocks were given, something else holds that storage too.
    """

    def __init__(self) -> None:
        self._given: Counter[StorageWeakRef] = Counter()  # how many tensors of each storage blocks were given so far
        # one entry per call: its segment, the storages that others held at the last look, and the result of add()
        self._held: list[tuple[int, list[StorageWeakRef], dict[StorageWeakRef, int]]] = []
        self._itself = 0  # the references to a storage that Python itself has
        alone = torch.empty(1)
        self._itself = self._users(storage_key(alone)) - 1

    def add(self, segment: int, tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
        """Note that a block's forward, which is the segment of index ``segment``, was given ``tensors``.

        Returns:
            The inputs that others hold for longer, each with the index of the first segment in which they no longer do.
            It is filled in while the step goes on.
        """
        until: dict[StorageWeakRef, int] = {}
        computed: dict[StorageWeakRef, None] = {}
        for tensor in tensors:
            for part in memory_in(tensor):
                key = storage_key(part)
                self._given[key] += 1
                if tensor.grad_fn is not None:
                    computed[key] = None
        self._held.append((segment, list(computed), until))
        return until

    def look(self, segment: int, *, returned: bool = False) -> set[StorageWeakRef]:
        """Note which inputs others hold at the start of ``segment``, or once the model has ``returned`` in it.

        Returns:
            The storages that they hold, of inputs of earlier calls.
        """
        found: set[StorageWeakRef] = set()
        calls, self._held = self._held, []
        for call, keys, until in calls:
            held = keys
            if returned or segment > call + 1:  # otherwise the block's caller is still running the same call
                held = [key for key in keys if self._users(key) > self._given[key]]
                until.update(dict.fromkeys(held, segment + 1))
                found.update(held)
            if held:
                self._held.append((call, held, until))
        return found

    def _users(self, key: StorageWeakRef) -> int:
        return torch._C._storage_Use_Count(key.cdata) - self._itself


class CheckpointedCall(Recomputation):
    """A call of a block in the trace, which keeps its inputs and is recomputed in backward.

    It keeps a tensor object of its own for each tensor that the block was given, so that it counts as one more user of
    the storage.
    """

    def __init__(self, label: str, modules: BlockModules, device: torch.device) -> None:
        super().__init__(label, modules, device)
        self.kept: Tensor | None = None  # takes the memory of what else a call keeps

    @override
    def as_given(self, leaf: Any) -> Any:
        return self.fresh_input(leaf) if isinstance(leaf, Tensor) else super().as_given(leaf)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first run, after ``first_run_begins``."""
        with saved_tensors_hooks(self.count_saved, self.restored):
            output = self.function(*args, **kwargs)
        self.first_run_ends()
        return output


@dataclass
class BlockUse:
    """The sums over all calls of one block in one forward; the peak is that of one call."""

    saved_bytes: int = 0
    saved_tensors: int = 0
    forward_peak_bytes: int = 0
    output_bytes: int = 0
    kept_bytes: int = 0  # what a call that is recomputed keeps beside its inputs
    operations: Operations = field(default_factory=Operations)  # of the eager forward
    # from the storage of an argument that has a grad_fn to its bytes
    inputs: dict[StorageWeakRef, int] = field(default_factory=dict)
    saved_inputs: set[StorageWeakRef] = field(default_factory=set)  # the inputs that autograd saves for the block


def measure_block(
    use: BlockUse,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    block: BlockModules,
    weights: StandInWeights,
) -> Callable[..., Any]:
    """Add what ``forward`` of ``block`` takes to ``use``, and return the forward to trace.

    Dispatch modes see nothing inside a compiled forward, so the eager forward says what is computed and used. On the
    CPU, where the meter is such a mode, the eager forward is traced in place of the compiled one, which needs no more
    memory. The trace's function mode is suspended around a compiled forward, as the compiler would trace it around
    every operator.
    """
    eager = eager_of(forward)
    if eager is forward or weights.device.type == "cpu":
        _measure(use, use.operations, eager, args, kwargs, block, weights)
        return eager
    _measure(BlockUse(), use.operations, eager, args, kwargs, block, weights)
    with without_own_modes(), _collecting_afterwards():
        _measure(use, None, forward, args, kwargs, block, weights)
    return forward


@contextmanager
def _collecting_afterwards() -> Iterator[None]:
    """Collect the garbage of what the body compiles when the body ends: cycles of the compiler hold what a block saved.

    The collector rests meanwhile, because to look again and again at all objects of torch would take longer.
    """
    known, was_enabled = graphs_compiled(), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if graphs_compiled() != known:
            gc.collect()


@contextmanager
def without_own_modes() -> Iterator[None]:
    """Take away the function modes of a step, which the compiler would trace around every operator."""
    with ExitStack() as stack:
        while isinstance(_get_current_function_mode(), Uses):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _measure(
    use: BlockUse,
    operations: Operations | None,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    block: BlockModules,
    weights: StandInWeights,
) -> None:
    """Call ``forward`` with copies of the arguments. Add what it holds to ``use``, and count its ``operations``.

    Saved tensors are counted by storage, without the arguments, weights and buffers.
    """
    saved: dict[StorageWeakRef, int] = {}
    # Masks and tensors that the caller holds anyway have no grad_fn. Tensors of other classes are never offloaded.
    use.inputs |= storages_in(
        [tensor for tensor in tensors_in((args, kwargs)) if tensor.grad_fn is not None and is_plain(tensor)]
    )
    given = memory_in((args, kwargs))
    cached: list[Tensor] = []

    def copy(leaf: Any) -> Any:
        if is_cache(leaf):
            cached.extend(tensors_of_cache(leaf))
            return copied_cache(leaf)
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    # The arguments are copied, because a block may write to its inputs in place.
    args, kwargs = map_leaves(copy, (args, kwargs))
    copies = {
        storage_key(copy): storage_key(tensor) for copy, tensor in zip(memory_in((args, kwargs)), given, strict=True)
    }
    known = {*copies, *storages_in(cached)}

    def pack(tensor: Tensor) -> Tensor:
        for part in memory_in(tensor):
            key = storage_key(part)
            if key in copies:
                use.saved_inputs.add(copies[key])
            elif key not in known:
                saved[key] = allocated_bytes(part)
        return tensor.detach()  # an output that keeps its own graph node alive would never be freed

    meter = weights.meter
    assert meter is not None, "only a step that measures comes here"
    # The run leaves no trace in modules and in random states.
    with weights.unobserved():
        before = block.at_call()
        known |= weights.storages()
    random_state = RandomState(weights.device, before.generators)
    meter.reset_peak()
    alive_bytes = meter.alive_bytes
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        nullcontext() if operations is None else operations,
    ):
        output = forward(*args, **kwargs)
    # The graph of a gradient that the block computed itself is gone, with what it saved.
    alive = {key: size for key, size in saved.items() if not key.expired()}
    with weights.unobserved():
        before.first_run_ends()
        before.undo()
        del before
    random_state.set()
    use.forward_peak_bytes = max(use.forward_peak_bytes, meter.peak_bytes - alive_bytes, sum(saved.values()))
    use.saved_bytes += sum(alive.values())
    use.saved_tensors += len(alive)
    use.output_bytes += sum(
        size
        for key, size in storages_in([*filter(Tensor.is_floating_point, memory_in(output))]).items()
        if key not in known
    )
    if operations is not None:
        operations.forward_ends(alive)
