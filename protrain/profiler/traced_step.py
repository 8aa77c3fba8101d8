"""One traced training step: which unit uses which parameter when, and what every stretch of it takes.

The step is the user's own forward and backward, with each block under non-reentrant checkpointing, so that the trace
needs the room of one block, whatever the model's size. A block's weights are on the device while its forward, or its
recomputation and backward, run. Boundaries are the block's call in forward, and in backward the gradients of its
outputs (start) and inputs (end). Between blocks each unit ends a stretch in forward and starts one in backward: what
the engine moves of a block is gone when the forward of the unit behind it is done, and comes when its backward begins.

What the model returns stays until backward is over, as in a loop that has ``output = model(**batch)``, and in such a
loop until the next forward is: :attr:`Step.output_bytes`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _pop_mode_temporarily
from torch.utils.checkpoint import set_checkpoint_early_stop

from protrain.common import batch as batches
from protrain.common.parameters import made_of
from protrain.common.trees import tensors_in
from protrain.forward.compilation import CompiledForward, eager_of, graphs_compiled
from protrain.profiler.given import GivenInputs, run_checkpointed
from protrain.profiler.inner_backwards import InnerBackwards
from protrain.profiler.meta_device import FusedAttention, as_if_on_gpu, fused_attention_in_graphs
from protrain.profiler.meter import CudaMeter, Meter, StorageMeter
from protrain.profiler.operations import storage_key
from protrain.profiler.probe import BlockUse, probe
from protrain.profiler.uses import Uses
from protrain.profiler.weights import Weights


@dataclass
class Segment:
    """A stretch of the step; times are stamps until the step is over."""

    phase: str
    block: str | None
    live_bytes: int = 0
    peak_bytes: int = 0
    start: Any = None
    recomputed: Any = None  # end of the recomputation in a block's backward segment
    end: Any = None
    # Of a block's forward: inputs that others hold for longer, with the index of the first stretch in which they don't.
    held_until: dict[StorageWeakRef, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Call:
    """One call of a block, or of a unit between blocks."""

    unit: str
    state: str = "pending"  # then "open" while its backward runs, then "closed"


class Step:
    """Runs a step of ``model`` with stand-in weights and keeps what it saw.

    Args:
        model: the model, holding the stand-ins of ``weights``.
        owned: per unit path, the indexes of the parameters it owns.
        blocks: the units among them that are blocks.
        weights: the stand-ins.
        device: where the step runs.
        measure: count memory, uses and operations; otherwise only take the times, undisturbed by that.
        differentiating: what measuring found of that name.
    """

    def __init__(
        self,
        model: nn.Module,
        owned: dict[str, tuple[int, ...]],
        blocks: list[str],
        weights: Weights,
        device: torch.device,
        *,
        measure: bool,
        show: Callable[[str], None],
        differentiating: Iterable[str] = (),
    ) -> None:
        self.segments: list[Segment] = []
        self.calls: list[str] = []  # units in the order of one forward
        self.uses: dict[str, dict[int, None]] = {}  # unit -> parameters it used without owning them
        self.blocks: dict[str, BlockUse] = {}  # in execution order
        self.kept_between: set[StorageWeakRef] = set()  # what others than blocks keep until backward
        self.active: list[str] = []  # units being called, innermost last
        self.within: dict[str, set[str]] = {}  # unit -> units that were active when it was called
        self.differentiating = set(differentiating)  # blocks whose forward makes graphs of gradients
        self.compiled = any(isinstance(model.get_submodule(path).forward, CompiledForward) for path in blocks)
        self._model = model
        self._owned = owned
        self._block_paths = blocks
        self._weights = weights
        self._device = device
        self._measure = measure
        self._show = show
        self._outer = {index for unit, indexes in owned.items() if unit not in blocks for index in indexes}
        self._inner = InnerBackwards({path: owned[path] for path in blocks}, self._outer, weights)
        self._constants = {storage_key(tensor) for tensor in (*weights.stand_ins, *weights.unmanaged_memory())}
        self.output_bytes = 0  # of what the model returned and was not given
        self._meter: Meter | None = None
        self._given = GivenInputs()
        self._open: Segment | None = None
        self._open_call: _Call | None = None
        self._held: list[Tensor] = []  # gradients of the stretch that is open
        self._forward = True
        self._recomputing = False
        self._probing = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Queue one forward and backward. An exception of the model passes, with a note on where it came from."""
        inputs = tensors_in((args, kwargs))
        with ExitStack() as stack:
            stack.enter_context(self._hooks())
            if self._device.type == "meta":
                if self.compiled:
                    stack.enter_context(fused_attention_in_graphs())
                stack.enter_context(as_if_on_gpu())
            if self._measure:
                self._meter = CudaMeter(self._device) if self._device.type == "cuda" else StorageMeter()
                self._weights.measured_by(self._meter)
                stack.callback(self._weights.measured_by, None)
                self._meter.count(inputs)
                stack.enter_context(self._meter)
            self._weights.keep(self._outer)
            try:
                self._run(args, kwargs)
            except Exception as error:
                where = f"block {self._open.block}" if self._open is not None and self._open.block else "the model"
                phase = "forward" if self._forward else "backward"
                error.add_note(f"raised while profiling {type(self._model).__name__}, in the {phase} of {where}")
                if self._device.type == "meta":
                    error.add_note(
                        "a model whose forward depends on values cannot be traced on meta; use the CPU or a GPU"
                    )
                raise

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.enable_grad(), set_checkpoint_early_stop(True):
            self._switch(None)
            saved = saved_tensors_hooks(self._note_saved, lambda tensor: tensor)
            uses = Uses(self._weights.index, self.used, self._differentiates)
            given = self._constants | {storage_key(tensor) for tensor in tensors_in((args, kwargs))}  # forward may add
            with uses if self._measure else nullcontext(), saved if self._measure else nullcontext():
                output = self._model(*args, **kwargs)
                loss = batches.loss_of(output)
            sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(output)}
            self.output_bytes = sum(size for key, size in sizes.items() if key not in given)
            self._forward = False
            self._switch(None)
            self.kept_between |= self._given.look(len(self.segments), returned=True)
            loss.backward()
            self._close()

    def _note_saved(self, tensor: Tensor) -> Tensor:
        if self._open is not None and self._open.block is None:  # not what the checkpoint keeps of a block's inputs
            self.kept_between.update(map(storage_key, made_of(tensor).values()))
        return tensor.detach()  # an output kept with its own graph node would never be freed

    # -- segments

    def _switch(self, block: str | None, call: _Call | None = None) -> None:
        """End the segment that is open and start the next."""
        self._close()
        self._show(f"{'forward' if self._forward else 'backward'} of {block or 'what lies between blocks'}")
        if block is not None:
            self._weights.fill(self._owned[block])
        self._open = Segment("forward" if self._forward else "backward", block)
        self._open_call = call
        if call is not None:
            call.state = "open"
        if self._meter is not None:
            self._meter.reset_peak()
            self._open.live_bytes = self._meter.alive_bytes
            if self._forward:
                self._given.look(len(self.segments))
        self._open.start = self._stamp()

    def _close(self) -> None:
        if self._open is None:
            return
        self._open.end = self._stamp()
        if self._meter is not None:
            self._open.peak_bytes = max(0, self._meter.peak_bytes - self._open.live_bytes)
        self.segments.append(self._open)
        if self._open_call is not None:
            self._open_call.state = "closed"
        self._held.clear()
        # On a GPU graphs of gradients are made by autograd's thread: their operations may come after all of this one's.
        if self._open.block is not None and (self._forward or self._open.block not in self.differentiating):
            self._weights.empty(self._owned[self._open.block])
        self._inner.give_back()
        self._open = self._open_call = None

    def _stamp(self) -> Any:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter() * 1e3

    # -- hooks

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Calls and blocks tracked inside, nothing of it left outside."""
        with ExitStack() as stack:
            for path in {"": None, **dict.fromkeys(self._owned)}:
                module = self._model.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(self._enter_hook(path), prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leave_hook(path), always_call=True).remove)
            for path in self._block_paths:
                module = self._model.get_submodule(path)
                before = module.__dict__.get("forward")
                stack.callback(_restore_forward, module, before)
                module.__dict__["forward"] = self._block_forward(path, module.forward)
            for parameter in self._weights.stand_ins:
                if parameter.requires_grad:
                    stack.callback(parameter.register_post_accumulate_grad_hook(self._take_gradient).remove)
                    stack.callback(setattr, parameter, "grad", None)
            yield

    def _enter_hook(self, path: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if self._forward:
                self.within.setdefault(path, set()).update(self.active)
                self.active.append(path)
                if not self._probing:
                    self.calls.append(path)
            elif path in self._block_paths and (self._open is None or self._open.block != path):  # its weights are away
                raise ValueError(
                    f"the model itself computes {path} again inside backward: take torch.utils.checkpoint out of its "
                    "forward, as the plan decides what is checkpointed"
                )

        return enter

    def _leave_hook(self, path: str) -> Callable[..., None]:
        inner = [block for block in self._block_paths if f"{block}.".startswith(f"{path}." if path else "")]
        between = path in self._owned and not inner

        def start(_: Tensor, call: _Call) -> None:
            # With its first output that has a gradient: the others' come while all of its gradients are still held.
            if call.state != "open" and not self._nested and self._open is not None and self._open.block is None:
                self._switch(None, call)

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            if not self._forward:
                return
            popped = self.active.pop()
            assert popped == path, f"{popped} left as {path}"
            # Without gradients the engine gives up nothing when it is done.
            if between and torch.is_grad_enabled() and self._open is not None and self._open.block is None:
                self._switch(None)
            call = _Call(path)
            if path in self._owned and path not in self._block_paths and not self._probing:
                for tensor in tensors_in(output):
                    if tensor.grad_fn is not None:
                        self._watch_nested(tensor.grad_fn, path)
                        if between:
                            tensor.register_hook(partial(start, call=call))

        return leave

    def _take_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self._open is not None:  # the engine has them together until the unit is done
            self._held.append(parameter.grad)
        parameter.grad = None

    def _block_forward(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            # Reached other than by calling the block, its parameters belong to whoever calls it.
            if not self._forward or self.active[-1:] != [path] or self._probing:
                return forward(*args, **kwargs)
            if not torch.is_grad_enabled():  # as in a frozen tower: nothing is kept, and so nothing to be decided
                self._weights.fill(self._owned[path])
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._weights.empty(self._owned[path])
            use = self.blocks.setdefault(path, BlockUse())
            self._close()
            self._show(f"forward of {path}")
            traced = forward
            if self._meter is not None:
                self._weights.fill(self._owned[path])
                self._probing = True
                try:
                    traced = self._probe(use, forward, args, kwargs)
                finally:
                    self._probing = False
            self._switch(path)
            assert self._open is not None
            call, inputs = _Call(path), tensors_in((args, kwargs))
            if self._meter is not None:
                self._open.held_until = self._given.add(len(self.segments), inputs)
            with self._as_compiled() if traced is not eager_of(forward) else nullcontext():
                output = run_checkpointed(self._recomputed(call, traced), args, kwargs)
            self._watch(call, inputs, tensors_in(output))
            self._switch(None)
            return output

        return checkpointed

    def _probe(
        self, use: BlockUse, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        """Add what ``forward`` takes to ``use``. Returns what to trace in its place.

        Modes see nothing of a compiled forward: the eager one says what is computed and used. On the CPU, where the
        meter is such a mode, it stands for the compiled one, which takes no more.
        """
        assert self._meter is not None
        eager = eager_of(forward)
        if eager is forward or self._device.type == "cpu":
            probe(use, eager, args, kwargs, self._constants, self._meter, self._device)
            return eager
        computed = BlockUse()
        probe(computed, eager, args, kwargs, self._constants, self._meter, self._device)
        use.flops += computed.flops
        use.traffic_bytes += computed.traffic_bytes
        use.fused_bytes += computed.fused_bytes
        use.attention += computed.attention
        known = graphs_compiled()
        with self._as_compiled():
            probe(use, forward, args, kwargs, self._constants, self._meter, self._device, count=False)
        if graphs_compiled() != known:
            # Where the collector ran meanwhile the compiler leaves cycles that hold what the block saved in this call.
            gc.collect()
        return forward

    @contextmanager
    def _as_compiled(self) -> Iterator[None]:
        """Without the function modes of the trace, around every one of whose operators the compiler would go."""
        with ExitStack() as stack:
            for _ in range(self._measure + (self._device.type == "meta")):
                stack.enter_context(_pop_mode_temporarily())
            yield

    def _recomputed(self, call: _Call, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._forward:
                if torch._C._current_graph_task_id() != -1 and call.unit not in (*self.active, self._inner.lent):
                    self._reached(call.unit, lasting=True)  # its outputs have no hook, and cannot tell
                return forward(*args, **kwargs)
            if call.state != "open":  # its outputs have no hook of their own: it starts with the first saved tensor
                self._switch(call.unit, call)
            self._recomputing = True
            try:
                # Backward suspends function modes.
                eager = self._device.type == "meta" and forward is eager_of(forward)
                with FusedAttention() if eager else nullcontext():
                    return forward(*args, **kwargs)
            finally:  # it ends with the last tensor that is saved, like the engine's: torch raises to stop it there
                assert self._open is not None
                self._open.recomputed = self._stamp()
                self._recomputing = False

        return run

    def _watch(self, call: _Call, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Start ``call``'s backward segment with its outputs' gradients, end it with the last of its inputs'."""

        def start(_: Tensor) -> None:
            if not self._nested and call.state == "pending":
                self._switch(call.unit, call)

        passed = {id(tensor) for tensor in inputs}
        waiting = {id(tensor) for tensor in inputs if tensor.requires_grad and not isinstance(tensor, nn.Parameter)}

        def end(_: Tensor, key: int) -> None:
            if self._nested:
                return
            # The gradient of an input that enters late, a skip connection, is there long before the block is done.
            waiting.discard(key)
            if not waiting and call.state == "open":
                self._switch(None)

        for tensor in outputs:
            if tensor.grad_fn is not None and id(tensor) not in passed:
                self._watch_nested(tensor.grad_fn, call.unit)
                tensor.register_hook(start)
        for tensor in {id(tensor): tensor for tensor in inputs if id(tensor) in waiting}.values():
            tensor.register_hook(partial(end, key=id(tensor)))

    # -- a backward inside the forward (torch.autograd.grad), which is part of the stretch that it runs in

    @property
    def _nested(self) -> bool:
        """Whether a backward that runs now is not the step's but one of a forward."""
        return self._forward or self._recomputing

    def _watch_nested(self, operation: torch.autograd.graph.Node, unit: str) -> None:
        """Note when such a backward comes to ``operation``, whose results ``unit`` has returned.

        A hook on a result itself would be called, too, where only its gradient is asked for.
        """

        def run(_: Any) -> None:
            if self._nested:
                self._reached(unit, lasting=torch.is_grad_enabled())

        operation.register_prehook(run)

    def _reached(self, unit: str, *, lasting: bool) -> None:
        self.within.setdefault(unit, set()).update(self.active)
        self._inner.reached(unit, self.active, lasting=lasting)

    def _differentiates(self) -> None:
        self.differentiating.update(path for path in self.active if path in self._block_paths)

    def used(self, index: int) -> None:
        """An operation takes the parameter ``index``: have it there, and note who used it."""
        unit = self.active[-1] if self.active else ""
        owned = index in self._owned.get(unit, ())
        if not (owned and self._weights.filled(index)):  # a block's own are not where a hook on it uses them
            self._weights.keep((index,))
        if not owned:
            self.uses.setdefault(unit, {})[index] = None


def _restore_forward(module: nn.Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward
