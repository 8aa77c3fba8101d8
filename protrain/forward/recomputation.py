"""A call of a block that runs again in backward, for the tensors that its first run saved.

[Note: a second run] The second run must do what the first has done, and leave no trace. It gets the arguments as they
were at the call: lists, dictionaries, objects and key/value caches are copied beforehand, as the model may put more
into them, and tensors are cut off from the graph of the first run. Its modules have the content that the first run
found (see [Note: what a block finds]), and it draws the same random numbers under the same autocast. The tensors that
autograd saves in it are those that the first run saved, in the same order. It ends with the last of them.

The engine recomputes blocks that a plan checkpoints, and the profiler recomputes every block. Both do it by this class,
so what works in the one works in the other, and what is refused is refused in both, in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks

from protrain.common.errors import MisuseError
from protrain.common.trees import copied_cache, is_cache, map_leaves, tensors_in, tensors_of_cache
from protrain.forward.module_state import BlockModules, RandomState

INPUTS = "its inputs, as it is recomputed"

# The vmap of torch.autograd.grad(is_grads_batched=True). That of torch.func is on the interpreter stack.
_VMAP = torch._C.DispatchKeySet(cast(Any, torch._C._parse_dispatch_key("VmapMode")))

_Form = tuple[torch.Size, torch.dtype]


class _Stop(Exception):
    """The second run has saved all that the first run saved, so the rest of the block need not run again."""


class Recomputation:
    """One call of the block ``modules``, which errors name by ``label``, on ``device``. See [Note: a second run].

    Who runs the block calls, in this order: ``first_run_begins``, the block, with ``count_saved`` for every tensor that
    autograd saves, and ``first_run_ends``. In backward ``restored`` gives what keeps a saved tensor.
    """

    def __init__(self, label: str, modules: BlockModules, device: torch.device) -> None:
        self._label = label
        self._block = modules
        self._on = device
        self._forms: list[_Form] = []  # of the tensors that the first run saved
        self._recomputed: dict[int, Any] = {}  # what keeps the tensors that the second run saved, by their number
        # The tensors that it was given, also in key/value caches, with their versions when the first run began.
        self.watched: list[tuple[Tensor, int]] = []

    # -- what a subclass may change

    def as_given(self, leaf: Any) -> Any:
        """The object that is kept in place of ``leaf``, which is one of the arguments or a part of one."""
        if is_cache(leaf):
            self.watched += watch(tensors_of_cache(leaf))
            return copied_cache(leaf)
        return leaf

    def fresh_input(self, leaf: Any) -> Any:
        """What a second run is given in place of the kept ``leaf``, so that it is no part of the first run's graph."""
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
            # Integers are in no graph, and torch knows the offsets of a nested tensor by their object.
            in_graph = leaf.is_floating_point() or leaf.is_complex()
            return leaf.detach().requires_grad_(leaf.requires_grad) if in_graph else leaf
        return copied_cache(leaf) if is_cache(leaf) else leaf

    def keep(self, tensor: Tensor) -> Any:
        """What keeps ``tensor``, which a second run saved."""
        return tensor.detach()  # an output that keeps its own graph node alive would never be freed

    def tensor_of(self, kept: Any) -> Tensor:
        """The tensor that ``kept`` keeps."""
        assert isinstance(kept, Tensor)
        return kept

    def around_second_run(self) -> AbstractContextManager[Any]:
        """A further context for the second run."""
        return nullcontext()

    def refuse_changes(self) -> None:
        """MisuseError if the second run would find something that has changed since the first."""
        if any(tensor._version != version for tensor, version in self.watched):
            raise written_over(self._label, INPUTS)
        if (name := self.modules.changed_tensor()) is not None:
            raise MisuseError(
                f"backward through {self._label} needs {name} as it was in forward, but it was written to since, and "
                "no copy had been made: write to a copy (tensor.clone()), or, if the model's own forward does it, run "
                "this step again, for which it will be copied"
            )

    # -- the first run

    def first_run_begins(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the first run of ``function``, which is given the arguments as they are."""
        self.function = function
        self.args, self.kwargs = map_leaves(self.as_given, (args, kwargs))
        self.watched += watch(tensors_in((self.args, self.kwargs)))
        self._autocast = autocast_of_now(self._on.type)
        self.modules = self._block.at_call()
        self._random_state = RandomState(self._on, self.modules.generators)

    def count_saved(self, tensor: Tensor) -> int:
        """Count ``tensor``, which the first run saves. Returns the number that stands for it."""
        self._forms.append(_form(tensor))
        return len(self._forms) - 1

    def first_run_ends(self) -> None:
        """End the first run."""
        self.modules.first_run_ends()
        self._recomputed.clear()  # it has entries if the block has computed gradients itself

    @property
    def needed(self) -> bool:
        """Whether the first run saved a tensor, so that backward may need a second run."""
        return bool(self._forms)

    # -- the second run

    def restored(self, number: int) -> Any:
        """What keeps the saved tensor that ``number`` stands for. It is no longer kept here."""
        if number not in self._recomputed:
            self._recompute()
        found = self._recomputed.pop(number, None)
        if found is None:
            raise self._other_operations(f"saved {len(self._forms)} tensors in forward but fewer when recomputed")
        return found

    def _recompute(self) -> None:
        self.refuse_changes()
        self._recomputed.clear()
        running = [self]  # the second run's graph may outlive it, and must not keep this object alive

        def unpack(index: int) -> Tensor:  # the block computes gradients itself
            assert running, "the recomputed graph has no backward of its own"
            return running[0].tensor_of(running[0]._recomputed[index])

        try:
            # A backward may run in vmap, where torch refuses to draw random numbers. The second run is no part of that.
            with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(_VMAP):
                args, kwargs = map_leaves(self.fresh_input, (self.args, self.kwargs))
                with (
                    self.modules.as_found(),
                    torch.enable_grad(),
                    self._random_state,
                    self._autocast(),
                    saved_tensors_hooks(self._keep, unpack),
                    self.around_second_run(),
                    suppress(_Stop),  # the innermost, as contexts end sooner without an error
                ):
                    self.function(*args, **kwargs)
        finally:
            running.clear()

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor that the second run saves. Returns its number, which autograd saves in place of it."""
        recomputed, forms = self._recomputed, self._forms
        index, form = len(recomputed), _form(tensor)
        if form != forms[index]:
            if tensor.layout is torch.jagged:
                raise MisuseError(
                    f"{self._label} makes the offsets of a nested tensor itself, and torch takes those of the "
                    "recomputation for others: make the offsets where the block is called, and pass them to it"
                )
            raise self._other_operations(
                f"saved {_described(forms[index])} in forward and {_described(form)} in its place when recomputed"
            )
        recomputed[index] = self.keep(tensor)
        if index + 1 == len(forms):
            raise _Stop
        return index

    def _other_operations(self, what: str) -> MisuseError:
        return MisuseError(
            f"{self._label} {what}: to be checkpointed its forward must do the same operations each time, and "
            "sdpa_kernel must be the same when backward runs"
        )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type to which torch.autocast casts now, or None where it is off. The meta device has none.

    A step that is counted on the meta device has the types of the model's tensors without autocast.
    """
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_of_now(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes a context in which torch.autocast does to operators what it does now."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cache_enabled = torch.is_autocast_cache_enabled()

    def same_autocast() -> AbstractContextManager[Any]:
        # There is nearly always none, so this must be fast.
        if not (enabled or torch.is_autocast_enabled(device_type)):
            return nullcontext()
        return torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)

    return same_autocast


def written_over(label: str, what: str) -> MisuseError:
    """The error for a backward that needs values which were changed since forward."""
    return MisuseError(
        f"backward through {label} needs {what}, but one was changed in place since: change a copy (tensor.clone(), "
        "inplace=False, or transformers.DynamicCache in place of a static cache)"
    )


def watch(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """``tensors`` with their versions, without tensors that have none, and without parameters: see [Note: edits]."""
    return [(t, t._version) for t in tensors if not isinstance(t, nn.Parameter) and not t.is_inference()]


def _form(tensor: Tensor) -> _Form:
    """The shape and type of ``tensor``. A nested tensor of the older layout has no shape, but one size."""
    whole = tensor.is_nested and tensor.layout is torch.strided
    return torch.Size((tensor.numel(),)) if whole else tensor.shape, tensor.dtype


def _described(form: _Form) -> str:
    return f"a {form[1]} tensor of shape {tuple(form[0])}"
