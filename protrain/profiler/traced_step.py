"""Runs one traced training step: which unit uses which parameter when, and what every segment of the step takes.

The step is the user's own forward and backward with each block recomputed, as the engine recomputes blocks, so the
trace needs the memory of one block, whatever the size of the model. The weights of a block are on the device while its
forward, or its recomputation and backward, run.

The step is cut into segments. In forward, a block's segment is its call. In backward, it starts with the gradients of
the block's outputs and ends with those of its inputs. Between blocks, each unit ends a segment in forward and starts
one in backward. At these points the engine has finished, or begins, moving the tensors of a block: what it offloads is
gone when the forward of the next unit is done, and is back when the backward of that unit begins.

What the model returns stays alive until backward is over, as in a training loop that has ``output = model(**batch)``.
In such a loop it stays until the next forward is over (``TracedStep.output_bytes``).

[Note: why the engine does not run this step] The engine also runs a model whose weights are absent, and the two share
recomputation and what is known of modules (``protrain.forward``). They do not share more, for three reasons. The engine
needs a layout of chunks, which is made from the order of uses that this step finds. It takes the model over, with its
values in pinned host memory, while a trace leaves the model as it was and runs on the meta device, where there are no
values. And it runs copies, flattening and updates beside the blocks, whose times and bytes are to be those of the
blocks alone: the models of a plan add the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from protrain.common import batch as batches
from protrain.common.trees import tensors_in
from protrain.forward.compilation import CompiledForward, eager_of, replace_attributes
from protrain.forward.module_state import BlockModules, Contents
from protrain.profiler.block_forward import BlockInputs, BlockUse, CheckpointedCall, measure_block, without_own_modes
from protrain.profiler.failed_step import explain
from protrain.profiler.memory_meter import CudaMeter, Meter, StorageMeter
from protrain.profiler.meta_device import KnownIntegers, as_if_on_gpu
from protrain.profiler.operations import storages_in
from protrain.profiler.stand_in_weights import StandInWeights, Uses
from protrain.profiler.step_times import Call, Segment, StepState, time_stamp


class TracedStep:
    """Runs a step of ``model`` with stand-in weights and records what it saw.

    Args:
        model: the model, holding the stand-ins of ``weights``.
        owned: for each unit's path, the indexes of the parameters it owns.
        modules: for each unit that is a block, its modules. Steps share them, as later steps know what they change.
        weights: the stand-ins, on the device where the step runs.
        measure: whether to count memory, parameter uses and operations. If not, only times are taken, undisturbed by
            the counting.
        show: called with a line on what is being done.
        known: on the meta device, the values of the batch's integers.
    """

    def __init__(
        self,
        model: nn.Module,
        owned: dict[str, tuple[int, ...]],
        modules: dict[str, BlockModules],
        weights: StandInWeights,
        *,
        measure: bool,
        show: Callable[[str], None],
        known: KnownIntegers | None = None,
    ) -> None:
        self.segments: list[Segment] = []
        self.calls: list[str] = []  # paths of units in the order in which one forward calls them
        self.uses: dict[str, set[int]] = {}  # from a unit to the parameters it used without owning them
        self.blocks: dict[str, BlockUse] = {}  # blocks in execution order
        # storages that code outside the blocks keeps until backward
        self.kept_until_backward: set[StorageWeakRef] = set()
        self._active: list[str] = []  # units whose calls are active, innermost last
        self.within: dict[str, set[str]] = {}  # from a unit to the units that were active when it was called
        self.compiled = any(isinstance(model.get_submodule(path).forward, CompiledForward) for path in modules)
        self._known = known
        self._model = model
        self._owned = owned
        self._modules = modules
        self._weights = weights
        self._device = weights.device
        self._measure = measure
        self._show = show
        self._outside_blocks = {index for unit, indexes in owned.items() if unit not in modules for index in indexes}
        self._reached: set[str] = set()  # units that a backward inside the forward has come to
        self._constants = weights.storages()  # they are no outputs, even where the model returns them
        self.output_bytes = 0  # of the tensors that the model returned and was not given
        self._inputs = BlockInputs()
        self._open: Segment | None = None
        self._open_call: Call | None = None
        self._segment_gradients: list[Tensor] = []  # parameters' gradients of the open segment
        self._state = StepState.FORWARD

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Queue one forward and backward. An exception of the model passes, with a note on where it came from."""
        with ExitStack() as stack:
            self._add_hooks(stack)
            for block in self._modules.values():
                stack.callback(block.forget)  # it may refer to this step, as the forward that the step gave the block
            stack.callback(torch.clear_autocast_cache)  # its casts of weights would outlast the weights
            stack.callback(nn.utils.parametrize._cache.clear)  # so would what parametrizations make of them
            if self._device.type == "meta":
                stack.enter_context(as_if_on_gpu(self._known, compiled=self.compiled))
            if self._measure:
                meter: Meter = CudaMeter(self._device) if self._device.type == "cuda" else StorageMeter()
                self._weights.measured_by(meter)
                stack.callback(self._weights.measured_by, None)
                meter.count(tensors_in((args, kwargs)))
                stack.enter_context(meter)
            self._weights.keep(self._outside_blocks)
            try:
                self._run(args, kwargs)
            except Exception as error:
                at = None if self._open is None else self._open.block
                explain(error, self._model, self._device, self._weights.dtype, phase=self._phase, block=at)
                raise

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.enable_grad():
            self._switch(None)
            saved = saved_tensors_hooks(self._note_saved, lambda tensor: tensor)
            uses = Uses(self._weights.index, self._used, self._differentiates)
            # a forward may add tensors to its arguments, so they are listed before
            given = self._constants.union(storages_in((args, kwargs)))
            with uses if self._measure else nullcontext(), saved if self._measure else nullcontext():
                output = self._model(*args, **kwargs)
                loss = batches.loss_of(output)
            self.output_bytes = sum(size for key, size in storages_in(output).items() if key not in given)
            self._state = StepState.BACKWARD
            self._switch(None)
            self.kept_until_backward |= self._inputs.look(len(self.segments), returned=True)
            loss.backward()
            self._close()

    def _note_saved(self, tensor: Tensor) -> Tensor:
        self.kept_until_backward.update(storages_in(tensor))
        return tensor.detach()  # an output that keeps its own graph node alive would never be freed

    # -- segments

    @property
    def _in_forward(self) -> bool:
        """Whether the model's forward is running and not the backward of the step."""
        return self._state in (StepState.FORWARD, StepState.MEASURING)

    @property
    def _phase(self) -> str:
        """The half of the step that is running, as records of segments name it."""
        return "forward" if self._in_forward else "backward"

    def _switch(self, block: str | None, call: Call | None = None) -> None:
        """End the open segment and start the next."""
        self._close()
        self._show(f"{self._phase} of {block or 'what lies between blocks'}")
        if block is not None:
            self._weights.fill(self._owned[block])
        self._open = Segment(self._phase, block)
        self._open_call = call
        if call is not None:
            call.reached = True
        if (meter := self._weights.meter) is not None:
            meter.reset_peak()
            self._open.live_bytes = meter.alive_bytes
            if self._in_forward:
                self._inputs.look(len(self.segments))
        self._open.start = time_stamp(self._device)

    def _close(self) -> None:
        if self._open is None:
            return
        self._open.end = time_stamp(self._device)
        if (meter := self._weights.meter) is not None:
            self._open.peak_bytes += max(0, meter.peak_bytes - self._open.live_bytes)
        self.segments.append(self._open)
        self._segment_gradients.clear()
        if self._open.block is not None:
            self._weights.empty(self._owned[self._open.block])
        self._open = self._open_call = None

    # -- hooks

    def _add_hooks(self, stack: ExitStack) -> None:
        """Track calls and blocks until ``stack`` ends. Then the model has none of the hooks."""
        for path in {"": None, **dict.fromkeys(self._owned)}:
            module = self._model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(self._enter_hook(path), prepend=True).remove)
            stack.callback(module.register_forward_hook(self._leave_hook(path), always_call=True).remove)
        for path in self._modules:
            block = self._model.get_submodule(path)
            stack.callback(replace_attributes([(block, "forward", self._block_forward(path, block.forward))]))
        for parameter in self._weights.stand_ins:
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(self._take_gradient).remove)
                stack.callback(setattr, parameter, "grad", None)

    def _enter_hook(self, path: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if self._in_forward:
                self.within.setdefault(path, set()).update(self._active)
                self._active.append(path)
                if self._state is not StepState.MEASURING:
                    self.calls.append(path)
            elif path in self._modules and (self._open is None or self._open.block != path):  # its weights are absent
                raise ValueError(
                    f"the model itself computes {path} again inside backward: take out torch.utils.checkpoint, or a "
                    "loss that does so (Cached... of sentence-transformers), as the plan decides what is checkpointed"
                )

        return enter

    def _leave_hook(self, path: str) -> Callable[..., None]:
        around_blocks = any(f"{block}.".startswith(f"{path}." if path else "") for block in self._modules)
        between = path in self._owned and not around_blocks

        def start(_: Tensor, call: Call) -> None:
            # The segment starts with the first output whose gradient arrives. The others arrive while all of the
            # block's gradients are still held.
            between_blocks = self._open is not None and self._open.block is None
            if call is not self._open_call and not self._nested and between_blocks:
                self._switch(None, call)

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            if not self._in_forward:
                return
            self._active.pop()
            # Without gradients the engine offloads nothing when the unit is done.
            if between and torch.is_grad_enabled() and self._open is not None and self._open.block is None:
                self._switch(None)
            call = Call(path)
            if path in self._owned and path not in self._modules and self._state is not StepState.MEASURING:
                for tensor in tensors_in(output):
                    if tensor.grad_fn is not None:
                        self._watch_nested(tensor.grad_fn, path)
                        if between:
                            tensor.register_hook(partial(start, call=call))

        return leave

    def _take_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self._open is not None:  # the engine holds the gradients of a unit until the unit is done
            self._segment_gradients.append(parameter.grad)
        parameter.grad = None

    def _block_forward(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            # If anything other than a call of the block leads here, the parameters count as used by the caller.
            if self._state is not StepState.FORWARD or self._active[-1:] != [path]:
                return forward(*args, **kwargs)
            if not torch.is_grad_enabled():  # a frozen part of the model saves nothing, so there is nothing to plan
                self._weights.fill(self._owned[path])
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._weights.empty(self._owned[path])
            use = self.blocks.setdefault(path, BlockUse())
            self._close()
            self._show(f"forward of {path}")
            traced = forward
            if self._measure:
                self._weights.fill(self._owned[path])
                self._state = StepState.MEASURING
                try:
                    traced = measure_block(use, forward, args, kwargs, self._modules[path], self._weights)
                finally:
                    self._state = StepState.FORWARD
            self._switch(path)
            assert self._open is not None
            call, inputs = Call(path), tensors_in((args, kwargs))
            checkpointed_call = CheckpointedCall(path, self._modules[path], self._device)
            with torch._C.DisableTorchFunction():  # to look at parameters is no use of them
                checkpointed_call.first_run_begins(self._recomputed(call, traced), args, kwargs)
            if self._measure:
                known = _storages_of(self._modules[path].module)
                self._open.held_until = self._inputs.add(len(self.segments), inputs)
            with nullcontext() if traced is eager_of(forward) else without_own_modes():
                output = self._weights.handed_on(checkpointed_call.run(args, kwargs))
            if self._measure:  # in later steps a call keeps what the call before has put into the modules
                made = _storages_of(self._modules[path].module)
                made_bytes = sum(size for key, size in made.items() if key not in known)
                checkpointed_call.kept = torch.empty(made_bytes, dtype=torch.uint8, device=self._device)
                use.kept_bytes += made_bytes + sum(copy.nbytes for copy in checkpointed_call.modules.copies.values())
            self._watch(call, inputs, tensors_in(output))
            self._switch(None)
            return output

        return checkpointed

    def _recomputed(self, call: Call, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._in_forward:
                if torch._C._current_graph_task_id() != -1 and call.unit not in {*self._active, *self._reached}:
                    self._reach(call.unit, lasting=True)  # its outputs have no hook that could tell
                return forward(*args, **kwargs)
            # its outputs have no hook of their own, so its segment starts when backward needs the first saved tensor
            if call is not self._open_call:
                self._switch(call.unit, call)
            self._state = StepState.RECOMPUTING
            try:
                return forward(*args, **kwargs)
            # the recomputation ends with the last saved tensor, as in the engine; torch stops it there by an exception
            finally:
                assert self._open is not None
                self._open.recomputed = time_stamp(self._device)
                self._state = StepState.BACKWARD

        return run

    def _watch(self, call: Call, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Start ``call``'s backward segment with the gradients of its outputs; end it with the last of its inputs'."""

        def start(_: Tensor) -> None:
            if not self._nested and not call.reached:
                self._switch(call.unit, call)

        passed = {id(tensor) for tensor in inputs}
        waiting = {id(tensor) for tensor in inputs if tensor.requires_grad and not isinstance(tensor, nn.Parameter)}

        def end(_: Tensor, key: int) -> None:
            if self._nested:
                return
            # An input that enters late, such as a skip connection, has its gradient long before the block is done.
            waiting.discard(key)
            if not waiting and call is self._open_call:
                self._switch(None)

        for tensor in outputs:
            if tensor.grad_fn is not None and id(tensor) not in passed:
                self._watch_nested(tensor.grad_fn, call.unit)
                tensor.register_hook(start)
        for tensor in {id(tensor): tensor for tensor in inputs if id(tensor) in waiting}.values():
            tensor.register_hook(partial(end, key=id(tensor)))

    # -- a backward inside the forward (torch.autograd.grad), which belongs to the segment that it runs in

    @property
    def _nested(self) -> bool:
        """Whether a backward that runs now belongs to a forward and is not that of the step."""
        return self._state is not StepState.BACKWARD

    def _watch_nested(self, operation: torch.autograd.graph.Node, unit: str) -> None:
        """Note when an inner backward comes to ``operation``, which computed what ``unit`` returned.

        A hook on the result itself would also be called where only the result's gradient is asked for.
        """

        def run(_: Any) -> None:
            if self._nested:
                self._reach(unit, lasting=torch.is_grad_enabled())

        operation.register_prehook(run)

    def _reach(self, unit: str, *, lasting: bool) -> None:
        """Fill the weights of ``unit`` for an inner backward. Its forward is over; its graph keeps them if ``lasting``.

        Raises:
            ValueError: a block runs this backward, whose recomputation would not have that graph.
        """
        self._reached.add(unit)
        self.within.setdefault(unit, set()).update(self._active)
        if unit not in self._modules:
            return
        calling = next((path for path in self._active if path in self._modules), None)
        if calling is not None:
            raise ValueError(
                f"the forward of {calling} computes gradients through {unit}, which does not work where the block is "
                "recomputed: call torch.autograd.grad in the module that calls the blocks, or only for what the block "
                "itself computes"
            )
        if lasting:
            self._weights.hold({*self._owned[unit], *self._outside_blocks})
        else:
            self._weights.keep(self._owned[unit])
        if unit in self.blocks and self._open:  # its inputs come back, if they are offloaded
            self._open.peak_bytes = max(self._open.peak_bytes, sum(self.blocks[unit].inputs.values()))

    def _differentiates(self) -> None:
        """Keep the weights of a block that computes gradients with ``create_graph=True``, also in later steps.

        On a GPU, autograd's own thread runs the operations of the graph of such gradients. They may still come after
        all operations of this thread.
        """
        self._weights.keep({at for path in self._active if path in self._modules for at in self._owned[path]})

    def _used(self, index: int) -> None:
        """Fill the parameter ``index``, which an operation is about to use, and note which unit uses it."""
        unit = self._active[-1] if self._active else ""
        owned = index in self._owned.get(unit, ())
        # a block's own parameters are empty when a hook on the block uses them
        if not (owned and self._weights.filled(index)):
            self._weights.keep((index,))
        if not owned:
            self.uses.setdefault(unit, set()).add(index)


def _storages_of(module: nn.Module) -> dict[StorageWeakRef, int]:
    """The storages of the tensors in the attributes of ``module`` and of the modules inside it, with their bytes."""
    return storages_in([value for *_, value in Contents.of(module).entries() if isinstance(value, Tensor)])
