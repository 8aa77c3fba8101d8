"""The engine: carries out a Plan, one training step after another. It never searches and never changes the plan.

The step, in the order in which things happen:

    root forward    inputs to the device, schedule to the start
    unit forward    fetch its chunks (usually there already), fetch ahead, run under the frame of its mode, let go
    unit backward   begins with the first saved tensor that autograd asks for: fetch, fetch ahead, fetch swapped
                    activations; ends when another unit's begins: gradients into chunks, let go
    end of backward the last unit ends
    step            persistent chunks are updated on the device, the others by the host worker, or some of them by the
                    device on what lies in host memory, in the order in which the next forward needs them; it returns
                    before they have finished, and a fetch waits for its own chunk alone; the first fetches of the next
                    forward are issued
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from protrain.common.errors import MisuseError
from protrain.engine.activations.ledger import Ledger
from protrain.engine.activations.saved import CheckpointFrame, Copy, Frame, WeightView
from protrain.engine.activations.swap import CheckpointSwapFrame, HostSlots, SwapFrame, Swaps
from protrain.engine.gradients.gradients import Gradients
from protrain.engine.inputs import Inputs
from protrain.engine.states.arena import Arena
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.states.edits import edit_in, recall
from protrain.engine.streams import Streams
from protrain.engine.units import Unit
from protrain.engine.updates.streamer import Streamer
from protrain.engine.updates.worker import HostWorker
from protrain.engine.weights.buffers import Buffer, BufferPool
from protrain.engine.weights.leaving import copies_of_weights, refuse_kept_views
from protrain.engine.weights.parameter import PresentParameter, edit_error, refuse_foreign_gradients
from protrain.engine.weights.released import ReleasedParameter, point_at, release
from protrain.engine.weights.views import ViewForm, storage_address
from protrain.planning.plan import BlockMode, Plan
from protrain.planning.schedule import Schedule
from protrain.profiler.model_profile import ModelProfile

_FRAMES: dict[BlockMode, type[Frame]] = {
    BlockMode.NONE: Frame,
    BlockMode.CKPT: CheckpointFrame,
    BlockMode.SWAP: SwapFrame,
    BlockMode.CKPT_SWAP: CheckpointSwapFrame,
}


class Engine:
    """Everything that a step touches. Built by :func:`protrain.engine.build.build_engine`."""

    def __init__(
        self,
        *,
        model: nn.Module,
        profile: ModelProfile,
        plan: Plan,
        device: torch.device,
        dtype: torch.dtype,
        streams: Streams,
        arena: Arena,
        worker: HostWorker,
        streamer: Streamer | None,
        stream_worker: HostWorker | None,
        chunks: list[Chunk],
        members: list[Member],
        units: list[Unit],
        buffers: BufferPool,
        gradients: Gradients,
        swap_slots: HostSlots,
        ledger: Ledger,
        training_order: Schedule,
        inference_order: Schedule,
    ) -> None:
        self.model = model
        self.profile = profile
        self.plan = plan
        self.device = device
        self.dtype = dtype
        self.streams = streams
        self.inputs = Inputs(device, streams)
        self.arena = arena
        self.worker = worker
        self.streamer = streamer  # None where the device updates nothing that lies in host memory
        self.stream_worker = stream_worker  # whose jobs its updates are
        self.chunks = chunks
        self.members = members
        self.units = units
        self.buffers = buffers
        self.gradients = gradients
        self.swaps = Swaps(swap_slots)
        self.ledger = ledger
        self.whole: set[int] = set()  # members that full_parameters has on the CPU now
        self.exported: dict[int, Member] = {}  # those that a state_dict() or load_state_dict() has in its hands now
        self.steps = 0  # changes of weights: by optimizer steps, and between them
        self.updated_inside: set[int] = set()  # chunks updated inside backward, whose step() is yet to come
        self.placeholder = torch.full((), float("nan"), dtype=dtype, device=device)  # expands to any shape
        self._training_order = training_order
        self._inference_order = inference_order
        self._order = training_order
        self._backward_start = len(profile.calls)
        self._earlier_unit = {profile.calls[at]: profile.calls[at - 1] for at in range(len(profile.calls) - 1, 0, -1)}
        self.weight_places: dict[int, Chunk | Buffer] = {  # by the address of the storage
            **{storage_address(chunk.weight): chunk for chunk in chunks if chunk.persistent},
            **{storage_address(buffer.memory): buffer for buffer in buffers.buffers},
        }
        self._frames = [_FRAMES[unit.mode] for unit in units]
        self._residents = [member for unit in units for member in unit.residents]
        self._edited: set[int] = set()  # chunks whose buffers hold what must not be used again
        self._current: Unit | None = None  # whose backward runs
        self._entered: Callable[[], Frame | None] = _nothing  # the call of it, which lives as long as its graph
        self._backward: weakref.ref[Any] | None = None  # of what autograd calls at its end; dead where it raised
        self._accumulates = False  # a gradient has come: torch.autograd.grad brings none
        # What the optimizer wants to know of backwards that bring gradients; see protrain.optim.optimizer.
        self.backward_begins: Callable[[], None] = lambda: None
        self.gradients_arrived: Callable[[list[Chunk]], None] = lambda chunks: None
        self.backward_ends: Callable[[], None] = lambda: None
        # What is asked of the gradient of one parameter; see protrain.optim.optimizer and protrain.optim.clipping.
        self.forget_gradient: Callable[[int], None]
        self.gradient_norm: Callable[[int], Tensor]
        self.multiply_gradient: Callable[[int, Tensor | float], None]

    # -- forward -------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward of the whole model begins: plan the fetches for what follows."""
        self.streams.refuse_another()
        self._let_go()
        self._fetch_for_forward(self._training_order if torch.is_grad_enabled() else self._inference_order)

    def begin_step(self) -> None:
        """A step begins. MisuseError where it cannot."""
        self.streams.refuse_another()
        self.refuse_while_whole("step()")
        self._let_go()
        self.refuse_edits()
        refuse_foreign_gradients(self.members)

    def expect_forward(self) -> None:
        """A step is over: what the next forward needs first goes up as soon as it is updated, before that begins."""
        self._fetch_for_forward(self._training_order)

    def _fetch_for_forward(self, order: Schedule) -> None:
        self._order = order
        order.restart()
        self.buffers.prefetch(self.chunks, order)

    def run_unit(self, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a unit's forward with its parameters on the device."""
        unit.calls += 1
        self._come_to(unit)
        args, kwargs = copies_of_weights((args, kwargs), self.weight_places, own=unit)
        self.bind(unit)
        try:
            self.buffers.prefetch(self.chunks, self._order)
            if torch.is_grad_enabled():
                output = self._frames[unit.index](self, unit).run(function, args, kwargs)
            else:
                output = function(*args, **kwargs)
            recall(unit.residents)
            output = copies_of_weights(output, self.weight_places)
        finally:
            self.unbind(unit)
        if torch.is_grad_enabled():
            refuse_kept_views(unit, self.buffers)
        return output

    def run_around(
        self, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit that is more than its forward, as hooks on it may use its parameters before and after.

        What they save is kept as it is: only the forward is recomputed, and hooks run once.
        """
        self._come_to(unit)
        self.bind(unit)
        try:
            frame = Frame(self, unit)
            with saved_tensors_hooks(frame.pack, frame.unpack) if torch.is_grad_enabled() else nullcontext():
                output = function(*args, **kwargs)
            output = copies_of_weights(output, self.weight_places)
        finally:
            self.unbind(unit)
        if torch.is_grad_enabled():
            refuse_kept_views(unit, self.buffers)
        return output

    def _come_to(self, unit: Unit) -> None:
        self.refuse_while_whole(f"the forward of {unit.label}")
        self.end_export(list(self.exported))  # of one that was interrupted
        if self._current is not None:
            self._make_way(unit)
        self._order.enter(unit.index)

    def _make_way(self, unit: Unit) -> None:
        """A forward inside backward, of a checkpoint of the user's own: buffers are for one unit at a time."""
        self.abandon_backward()
        if self._current is not None and self._current.index not in self.profile.units[unit.index].within:
            self._leave_unit()

    def bind(self, unit: Unit) -> None:
        """Put the unit's parameters on the device and keep them there."""
        acquired = self.buffers.acquire_all(unit.chunks, self._order)
        for member in unit.members:
            member.bound += 1
            if member.bound == 1:
                point_at(member.parameter, member.view(acquired[member.chunk.index]))
        for chunk in unit.resident_chunks:
            if not chunk.holders:
                chunk.viewers.begin_use()
            chunk.holders += 1
        for member in unit.residents:
            member.bound += 1
            member.parameter.__class__ = PresentParameter

    def unbind(self, unit: Unit) -> None:
        """End one ``bind``."""
        how = {member: edit_in(member, self.buffers.content(member.chunk)) for member in unit.members}
        edited = [member for member in unit.members if how[member]]
        for member in unit.members:
            member.bound -= 1
            if member.bound == 0:
                release(member.parameter, self.placeholder)
        for member in unit.residents:
            member.bound -= 1
            if member.bound == 0:
                member.parameter.__class__ = ReleasedParameter
        for chunk in unit.resident_chunks:
            chunk.holders -= 1
        self._edited |= {member.chunk.index for member in edited}
        for chunk in unit.chunks:
            self.buffers.release(chunk)
            if chunk.index in self._edited and not self.buffers.held(chunk):
                self.buffers.invalidate(chunk)
                self._edited.remove(chunk.index)
        if edited:
            raise edit_error(edited[0].name, str(how[edited[0]]))

    # -- backward ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """The first sign of a backward: have its end announced."""
        if self._backward is not None:
            if self._backward() is not None:  # this backward, or one around it
                return
            self._abandon()
            self.gradients.flush()  # what had come is added to, as autograd adds to .grad
        self.refuse_while_whole("backward()")
        self.end_export(list(self.exported))
        end = partial(self._end_backward)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._backward = weakref.ref(end)
        del end  # autograd alone has it, and lets go of it with the backward, however that ends
        self._accumulates = False
        self._order = self._training_order
        self.swaps.begin_backward()
        self.gradients.delivered.clear()

    def in_backward_of(self, frame: Frame) -> bool:
        """Whether :meth:`enter_backward` would do nothing: it is asked for every tensor that was saved."""
        return (
            self._entered() is frame
            and frame.steps == self.steps
            and self._backward is not None
            and self._backward() is not None
        )

    def enter_backward(self, frame: Frame) -> None:
        """Backward has reached the unit that ``frame`` is a call of; whatever it was in before is done."""
        self.begin_backward()
        unit = frame.unit
        if self._current is unit:
            self._entered = weakref.ref(frame)
            return
        self._leave_unit()
        self._order.enter(unit.index, start=self._backward_start)
        self.bind(unit)
        self._current, self._entered = unit, weakref.ref(frame)
        self.buffers.prefetch(self.chunks, self._order)
        earlier = self._earlier_unit.get(unit.index)
        if earlier is not None:
            self.swaps.fetch_ahead(self.units[earlier])

    def gradient_ready(self, index: int) -> None:
        """Autograd has accumulated the whole gradient of parameter ``index``."""
        self.begin_backward()
        if not self._accumulates:
            try:
                self.backward_begins()
            except BaseException:  # refused: nothing of this backward may be left for the next
                self.gradients.discard(self.members[index])
                raise
            self._accumulates = True
        self.gradients.collect(self.members[index])

    def _leave_unit(self) -> None:
        self._let_go_of_current()
        arrived = self.gradients.flush()
        if arrived:
            self.gradients_arrived(arrived)

    def _end_backward(self) -> None:
        with self.streams.computing():  # autograd calls this on the stream that was current around backward()
            self._leave_unit()
            self._backward = None
            if self._accumulates:
                self.backward_ends()

    def abandon_backward(self) -> bool:
        """Forget a backward that raised in the middle, so that what comes next starts clean; whether there was one."""
        if self._backward is None:
            return False
        failed = self._backward() is None or torch._C._current_graph_task_id() == -1
        if failed:
            self._abandon()
            self.gradients.abandon()
        return failed

    def _let_go(self) -> None:
        """Forget what raised in the middle, and whatever Ctrl-C left held in between: between steps nothing is."""
        self.abandon_backward()
        held = self.buffers.anything_held() or any(chunk.holders for chunk in self.chunks)
        if self._backward is None and held and not self._runs_a_unit():
            self.buffers.release_all()
            for chunk in self.chunks:
                chunk.holders = 0
            for member in self.members:
                member.bound = 0
                if member.index not in self.whole and member.index not in self.exported:
                    self.put_away(member)

    def _runs_a_unit(self) -> bool:
        """Whether this is called from a unit's forward (a hook saves the model, say). The stack knows.

        A count of them would be wrong after Ctrl-C at the wrong moment.
        """
        codes = (Engine.run_unit.__code__, Engine.run_around.__code__)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code in codes and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def _abandon(self) -> None:
        self._backward = None
        self._let_go_of_current()

    def _let_go_of_current(self) -> None:
        self._entered = _nothing
        unit, self._current = self._current, None
        if unit is not None:
            self.unbind(unit)

    def gradient_pending(self, index: int) -> bool:
        """Whether parameter ``index`` has a gradient. One that a failed backward has not stored does not count."""
        self.abandon_backward()
        return self.gradients.is_pending(index)

    @property
    def in_backward(self) -> bool:
        """Whether a backward runs that brings gradients."""
        return self._backward is not None

    # -- saved tensors -------------------------------------------------------------------------------------------------

    def weight_view(self, tensor: Tensor, buffer: Buffer) -> WeightView:
        """``tensor``, which lies in ``buffer``, as a view of the chunk there."""
        assert buffer.holders > 0, "a weight is used while no unit holds its chunk"
        assert buffer.chunk is not None
        return WeightView(buffer.chunk, ViewForm.of(tensor))

    def weight(self, view: WeightView) -> Tensor:
        """``view`` on the buffer that holds its chunk now; the current unit keeps it there.

        Where backward makes a graph of its own (``create_graph=True``) that outlives the buffer's content: a copy.
        """
        weight = view.form.on(self.buffers.content(view.chunk))
        if torch.is_grad_enabled():
            weight = Copy.apply(weight)
            self.ledger.hold(weight)
        return weight

    def held(self, chunk: Chunk) -> bool:
        """Whether a unit holds ``chunk`` in a buffer now."""
        return not chunk.persistent and self.buffers.held(chunk)

    # -- between steps -------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[HostWorker]:
        """Every thread that updates chunks."""
        return [worker for worker in (self.worker, self.stream_worker) if worker is not None]

    def wait_for_updates(self) -> None:
        """Block until every update of the last step is done and visible to the host."""
        for worker in self.workers:
            worker.drain()
        for chunk in self.chunks:
            chunk.wait_for_update()
            chunk.wait_for_states()

    def refuse_while_whole(self, what: str) -> None:
        """MisuseError inside full_parameters: the CPU copies would be neither used nor updated."""
        if self.whole:
            name = self.members[min(self.whole)].name
            raise MisuseError(
                f"{what} inside `with protrain.full_parameters(...)`, which has {name} on the CPU: leave it first"
            )

    def put_away(self, member: Member) -> None:
        """No unit uses the parameter of ``member``: where its weight does not persist it has no data now."""
        if member.chunk.persistent:
            point_at(member.parameter, member.view(member.chunk.weight))
            member.parameter.__class__ = ReleasedParameter
        else:
            release(member.parameter, self.placeholder)

    def end_export(self, members: Iterable[int]) -> None:
        """What state_dict() or load_state_dict() had in its hands are parameters like the others again."""
        for index in members:
            member = self.exported.pop(index, None)
            if member is not None and index not in self.whole:
                member.parameter.__class__ = PresentParameter if member.bound else ReleasedParameter

    def refuse_edits(self) -> None:
        """MisuseError for a persistent weight that was changed elsewhere than inside full_parameters."""
        # Few, if any: every parameter is looked at in every step, so the one look is as quick as it can be.
        with torch._C.DisableTorchFunctionSubclass():
            changed = [member for member in self._residents if member.parameter._version != member.edits]
            recall(member for member in changed if member.index not in self.whole)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing of the engine runs inside: for reading and writing state from the host."""
        self._let_go()
        self.wait_for_updates()
        self.streams.synchronize()
        self.refuse_edits()
        yield

    def weights_changed(self, chunks: list[Chunk]) -> None:
        """Weights were written outside a step: what the device holds of them is out of date."""
        for chunk in chunks:
            chunk.version += 1
            if not chunk.persistent:
                self.buffers.invalidate(chunk)
        self.steps += 1


def _nothing() -> None:
    """Stands for a reference that is dead."""
