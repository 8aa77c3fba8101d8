"""What a random script may do in a step.

An action is a function that gets a side, or the name of a method that either side has of its own. What it returns, a
list of values or one or none, both sides must agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.random_scripts.models import WIDTH, batch

_OFTEN = ("usual",) * 8
# Several ranks refuse these.
OF_ONE_PROCESS = ("two", "part", "weights", "only weights", "checkpointed", "reentrant", "by hand", "weight penalty")
_MORE = "block", "autocast", "penalty", "both", "huge", "saved on cpu", "hooked", "frozen start", "sampled"
KINDS = (*_OFTEN, *_MORE, *OF_ONE_PROCESS)


Act = Callable[..., Any] | str


def perform(side: Any, action: Act, options: dict[str, Any]) -> list[Any]:
    """Let ``side`` do ``action``. Returns the values that it gives."""
    found = getattr(side, action)(**options) if isinstance(action, str) else action(side, **options)
    return found if isinstance(found, list) else [] if found is None else [found]


def square(output: Tensor) -> Tensor:
    """The mean square."""
    return output.float().square().mean()


def loss_of(model: Any, *, seed: int, kind: str = "usual", size: int = 8, block: int = 0, **_: Any) -> Tensor:
    """A loss of one of the kinds that scripts have."""
    x, dtype = batch(seed, size), model.leave.weight.dtype
    if kind == "both":  # losses of one forward
        output = model(x)
        return square(output) + output.float().abs().sum() * 0.01
    if kind == "huge":  # in float16 its gradients overflow
        return square(model(x)) * 1e6
    if kind == "two":
        return square(model(x)) + square(model(x.flip(0))) * 0.5
    if kind == "part":
        first = model(x)
        return first[:2].float().square().sum() + model(x[:4]).float().abs().sum()
    if kind == "block":
        hidden = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))
        return square(model.blocks[block](hidden.to(dtype)))
    if kind == "weights":
        return square(model(x)) + model.blocks[block].first.weight.float().square().sum() * 0.1
    if kind == "only weights":
        return model.blocks[block].second.weight.float().square().sum() * 0.1
    if kind == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square(model(x))
    if kind == "penalty":
        x = x.to(dtype).requires_grad_()
        loss = square(model(x))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.float().square().sum()
    if kind == "weight penalty":
        loss = square(model(x))
        weights = [model.blocks[block].first.weight, model.leave.weight]
        weights = [weight for weight in weights if weight.requires_grad]
        for gradient in torch.autograd.grad(loss, weights, create_graph=True) if weights else ():
            loss = loss + gradient.float().square().sum()
        return loss
    if kind == "by hand":  # which leaves out some blocks, and goes through the others from the last to the first
        hidden = model.enter(x.to(dtype))
        for index in reversed(range(len(model.blocks))):
            if index != block:
                hidden = model.blocks[index](hidden)
        return square(model.leave(hidden))
    if kind == "frozen start":  # a block that a hook takes out of the graph
        handle = model.blocks[block].register_forward_hook(lambda module, inputs, output: output.detach())
        try:
            return square(model(x))
        finally:
            handle.remove()
    if kind == "sampled":  # what a model has generated is learnt from
        with torch.no_grad():
            rows = model(x)
        return square(model(torch.cat([rows, rows.tanh()], dim=1)))
    if kind == "saved on cpu":
        with torch.autograd.graph.save_on_cpu():
            return square(model(x))
    if kind == "hooked":
        output = model(x)
        output.retain_grad()
        output.register_hook(lambda gradient: gradient * 0.5)
        return square(output)
    if kind == "reentrant":
        return square(model.leave(checkpoint(model.blocks[block], model.enter(x.to(dtype)), use_reentrant=True)))
    if kind == "checkpointed":
        hidden = checkpoint(model.enter, x.to(dtype), use_reentrant=False)
        return square(model.leave(checkpoint(model.blocks[block], hidden, use_reentrant=False)))
    return square(model(x))


# -- steps -------------------------------------------------------------------------------------------------------------


def backward(side: Any, **loss: Any) -> list[Any]:
    value = loss_of(side.model, **loss)
    side.optimizer.backward(value)
    return [value.detach()]


def backward_no_sync(side: Any, **loss: Any) -> list[Any]:
    with side.model.no_sync():
        return backward(side, **loss)


def plain_backward(side: Any, **loss: Any) -> list[Any]:
    value = loss_of(side.model, **loss)
    value.backward()
    return [value.detach()]


def backward_twice(side: Any, **loss: Any) -> list[Any]:
    value = loss_of(side.model, **loss)
    value.backward(retain_graph=True)
    value.backward()
    return [value.detach()]


def backward_of_parts(side: Any, seed: int, size: int) -> list[Any]:
    """Two losses of one forward, each with its backward."""
    output = side.model(batch(seed, size))
    square(output).backward(retain_graph=True)
    output.float().abs().sum().backward()
    return [output.detach()]


def backward_of_list(side: Any, seed: int, size: int) -> list[Any]:
    """Two losses in one backward."""
    output = side.model(batch(seed, size))
    torch.autograd.backward([square(output), output.float().abs().sum()])
    return [output.detach()]


def backward_to_weight(side: Any, seed: int, size: int, block: int) -> list[Any]:
    """A backward that brings a gradient to one weight alone."""
    loss = square(side.model(batch(seed, size)))
    loss.backward(inputs=[side.model.blocks[block].first.weight])
    return [loss.detach()]


def forward_alone(side: Any, **loss: Any) -> list[Any]:
    """A forward without a backward, as of a script that forgets no_grad."""
    return [loss_of(side.model, **loss).detach()]


def forward_for_later(side: Any, **loss: Any) -> list[Any]:
    side.pending.append(loss_of(side.model, **loss))
    return [side.pending[-1].detach()]


def forward_for_two(side: Any, seed: int, size: int) -> list[Any]:
    """Two losses of one forward, for backwards that come later."""
    output = side.model(batch(seed, size))
    side.pending += [square(output), output.float().abs().sum() * 0.01]
    return [output.detach()]


def backward_of_pending(side: Any, last: bool, retained: bool) -> list[Any]:
    """The backward of a loss of an earlier forward. If its graph is ``retained``, another backward may follow."""
    if not side.pending:
        return []
    place = -1 if last else 0
    if retained:
        side.pending[place].backward(retain_graph=True)
    else:
        side.optimizer.backward(side.pending.pop(place))
    return [True]


def drop_pending(side: Any) -> None:
    side.pending.clear()


def clip(side: Any, max_norm: float) -> list[Any]:
    return [side.optimizer.clip_grad_norm_(max_norm).detach().clone()]


def clip_unless_finite(side: Any, seed: int) -> list[Any]:
    """A loss is not a number, and the script forgets the step when it sees the norm."""
    side.optimizer.backward(square(side.model(batch(seed))) * float("nan"))
    norm = side.optimizer.clip_grad_norm_(1.0).detach().clone()
    side.zero_grad()
    return [norm]


def step(side: Any) -> None:
    side.optimizer.step()


def leave_zeros(side: Any) -> None:
    side.zero_grad(set_to_none=False)


def step_and_zero(side: Any) -> None:
    side.optimizer.step()
    side.zero_grad()


def step_and_leave_zeros(side: Any) -> None:
    side.optimizer.step()
    leave_zeros(side)


def step_with_closure(side: Any, **loss: Any) -> list[Any]:
    """As the loops of Lightning do it: backward is inside the call of step()."""
    value = loss_of(side.model, **loss)
    side.step_with(lambda: side.optimizer.backward(value) or value)
    side.zero_grad()
    return [value.detach()]


_CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "anomaly": torch.autograd.detect_anomaly,
}
CONTEXTS = tuple(_CONTEXTS)


def under(side: Any, context: str, action: Act, options: dict[str, Any]) -> list[Any]:
    """An action under a context of torch."""
    with _CONTEXTS[context]():
        return perform(side, action, options)


def fail(side: Any, block: int, where: str, seed: int, interrupt: bool) -> list[Any]:
    """A forward or a backward raises an error or is interrupted, and the script forgets the step."""
    module = side.model.blocks[block]
    module.fails, module.error = where, KeyboardInterrupt if interrupt else ArithmeticError
    try:
        side.optimizer.backward(square(side.model(batch(seed))))
    except (ArithmeticError, KeyboardInterrupt) as error:
        found = str(error)
    else:
        found = "nothing fails"
    finally:
        module.fails = ""
    side.zero_grad()
    return [found]


def gradient_of_input(side: Any, seed: int, size: int) -> list[Any]:
    x = batch(seed, size).to(side.model.leave.weight.dtype).requires_grad_()
    return list(torch.autograd.grad(square(side.model(x)), x))


def gradient_of_weight(side: Any, seed: int, block: int) -> list[Any]:
    loss = square(side.model(batch(seed)))
    weight = side.model.blocks[block].first.weight
    return list(torch.autograd.grad(loss, [weight])) if weight.requires_grad else []
