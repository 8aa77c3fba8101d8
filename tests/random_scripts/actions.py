"""What a random script may do. Every action is called with a side and returns values that both sides must agree on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.harness import PLANS, Spec
from tests.random_scripts.sides import DEPTH, WIDTH, Case, batch

Action = tuple[Callable[..., list[Any]], dict[str, Any]]
_KINDS = ("usual",) * 5 + ("two", "part", "block", "weights", "only weights", "autocast", "penalty", "checkpointed")


def square(output: Tensor) -> Tensor:
    """The mean square."""
    return output.float().square().mean()


def loss_of(model: Any, kind: str, seed: int, size: int, block: int) -> Tensor:
    """A loss of one of the kinds that scripts have."""
    x, dtype = batch(seed, size), model.leave.weight.dtype
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


def forward_for_later(side: Any, **loss: Any) -> list[Any]:
    side.pending.append(loss_of(side.model, **loss))
    return [side.pending[-1].detach()]


def backward_of_pending(side: Any, last: bool) -> list[Any]:
    if not side.pending:
        return []
    side.optimizer.backward(side.pending.pop(-1 if last else 0))
    return [True]


def drop_pending(side: Any) -> list[Any]:
    side.pending.clear()
    return []


def clip(side: Any, max_norm: float) -> list[Any]:
    if side.is_clipped:  # the plain loop clips once
        return []
    norm = side.optimizer.clip_grad_norm_(max_norm).detach().clone()
    side.is_clipped = True
    return [norm]


def step(side: Any) -> list[Any]:
    side.optimizer.step()
    return []


def zero_grad(side: Any) -> list[Any]:
    side.zero_grad()
    return []


def step_and_zero(side: Any) -> list[Any]:
    return step(side) + zero_grad(side)


def scale_gradient(side: Any, index: int) -> list[Any]:
    return [side.scale_gradient(index)]


def drop_gradient(side: Any, index: int) -> list[Any]:
    return [side.drop_gradient(index)]


def fail(side: Any, block: int, where: str, seed: int) -> list[Any]:
    """A forward or a backward raises an error, and the script forgets the step."""
    module = side.model.blocks[block]
    module.fails = where
    try:
        side.optimizer.backward(square(side.model(batch(seed))))
    except ArithmeticError as error:
        found = str(error)
    else:
        found = "nothing fails"
    finally:
        module.fails = ""
    side.zero_grad()
    return [found]


# -- between steps -----------------------------------------------------------------------------------------------------


def set_group(side: Any, group: int, key: str, value: Any) -> list[Any]:
    side.optimizer.param_groups[group][key] = value
    return []


def freeze(side: Any, index: int, trained: bool) -> list[Any]:
    side.parameter(index).requires_grad_(trained)
    return []


def freeze_block(side: Any, block: int, trained: bool) -> list[Any]:
    side.model.blocks[block].requires_grad_(trained)
    return []


def evaluate(side: Any, seed: int, size: int, inference: bool, train: bool) -> list[Any]:
    before = [module.training for module in side.model.modules()]
    side.model.train(train)
    with torch.inference_mode() if inference else torch.no_grad():
        output = side.model(batch(seed, size)).clone()
    for module, was in zip(side.model.modules(), before, strict=True):
        module.training = was
    return [output]


def read(side: Any, index: int) -> list[Any]:
    parameter = side.parameter(index)
    return [parameter.detach().clone(), parameter.norm().detach(), (parameter * 2).detach().sum()]


def set_mode(side: Any, block: int | None, train: bool) -> list[Any]:
    (side.model if block is None else side.model.blocks[block]).train(train)
    return []


def edit(side: Any, index: int, factor: float) -> list[Any]:
    side.edit(index, factor)
    return []


def keep(side: Any) -> list[Any]:
    side.keep()
    return []


def go_back(side: Any, with_optimizer: bool) -> list[Any]:
    if side.snapshot is not None:
        side.go_back(with_optimizer=with_optimizer)
    return []


def resume(side: Any, spec: Spec, folder: Path) -> list[Any]:
    """A new model, under another plan, goes on from a checkpoint. Hooks and snapshots do not move along."""
    unhook(side)
    side.snapshot = None
    side.give_up()
    side.resume(spec, folder)
    return []


def _double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def _halve_all(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in of_inputs)


def hook(side: Any, block: int, kind: str) -> list[Any]:
    module = side.model.blocks[block]
    if kind == "forward":
        handle = module.register_forward_hook(_double)
    elif kind == "forward of a layer":
        handle = module.first.register_forward_hook(_double)
    elif kind == "backward":
        handle = module.register_full_backward_hook(_halve_all)
    else:
        handle = module.second.weight.register_hook(lambda gradient: gradient * 0.5)
    side.handles.append(handle)
    return []


def unhook(side: Any) -> list[Any]:
    while side.handles:
        side.handles.pop().remove()
    return []


def gradient_of_input(side: Any, seed: int, size: int) -> list[Any]:
    x = batch(seed, size).to(side.model.leave.weight.dtype).requires_grad_()
    return list(torch.autograd.grad(square(side.model(x)), x))


def gradient_of_weight(side: Any, seed: int, block: int) -> list[Any]:
    loss = square(side.model(batch(seed)))
    weight = side.model.blocks[block].first.weight
    return list(torch.autograd.grad(loss, [weight])) if weight.requires_grad else []


# -- scripts -----------------------------------------------------------------------------------------------------------

WITH_A_BATCH = frozenset(
    {backward, backward_no_sync, plain_backward, evaluate, gradient_of_input, gradient_of_weight, fail}
)
_OF_ONE_PROCESS = frozenset({backward_twice, forward_for_later, backward_of_pending, read})


def draw(rng: random.Random, case: Case) -> list[Action]:
    """A script of some steps, with other things before, between and after them."""
    found: list[Action] = []
    for _ in range(rng.choice((3, 5, 8))):
        while rng.random() < 0.4:
            found.append(_other(rng))
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            found.append((rng.choice((backward_no_sync, backward)), _loss(rng)))
            if rng.random() < 0.2:
                found.append(_other(rng))
        found.append((rng.choice((backward, backward, backward, plain_backward, backward_twice)), _loss(rng)))
        if rng.random() < 0.2:
            found.append(_other(rng))
        if rng.random() < 0.5:
            found.append((clip, {"max_norm": rng.choice((0.1, 100.0))}))
        if rng.random() < 0.2:
            found.append(_other(rng))
        found.append((step_and_zero, {}))
    if case.inside:  # an update cannot be taken back
        found = [each for each in found if each[0] is not backward_twice and each[1].get("where") != "backward"]
        if case.ranks > 1 and case.model == "branching":  # refused in its middle if only one of both calls has a block
            found = [each for each in found if each[1].get("kind") != "part"]
    if case.ranks > 1:
        found = [each for each in found if each[0] not in _OF_ONE_PROCESS]
    return found


def told(action: Action) -> str:
    """``action`` as it would be written."""
    options = [f"{key}={value if key == 'spec' else repr(value)}" for key, value in action[1].items()]
    return f"{action[0].__name__}({', '.join(options)})"


def _loss(rng: random.Random) -> dict[str, Any]:
    size = rng.choice((8, 8, 8, 5, 3))
    return {"kind": rng.choice(_KINDS), "seed": rng.randrange(6), "size": size, "block": rng.randrange(DEPTH)}


def _other(rng: random.Random) -> Action:
    block, index, half = rng.randrange(DEPTH), rng.randrange(4 + 6 * DEPTH), rng.random() < 0.5
    group, size = rng.randrange(2), rng.choice((8, 3))
    choices: list[Action] = [
        (set_group, {"group": group, "key": "lr", "value": rng.choice((0.0, 1e-3, 1e-2))}),
        (set_group, {"group": group, "key": "weight_decay", "value": rng.choice((0.0, 0.1))}),
        (set_group, {"group": group, "key": "betas", "value": rng.choice(((0.9, 0.95), (0.5, 0.9)))}),
        (freeze, {"index": index, "trained": half}),
        (freeze_block, {"block": block, "trained": half}),
        (evaluate, {"seed": 7, "size": size, "inference": half, "train": rng.random() < 0.3}),
        (read, {"index": index}),
        (set_mode, {"block": rng.choice((None, block)), "train": half}),
        (hook, {"block": block, "kind": rng.choice(("forward", "forward of a layer", "backward", "gradient"))}),
        (unhook, {}),
        (fail, {"block": block, "where": "forward" if half else "backward", "seed": 1}),
        (gradient_of_input, {"seed": 2, "size": size}),
        (gradient_of_weight, {"seed": 2, "block": block}),
        (forward_for_later, _loss(rng)),
        (backward_of_pending, {"last": half}),
        (drop_pending, {}),
        (zero_grad, {}),
        (step, {}),
        (resume, {"spec": rng.choice(PLANS)}),
        (edit, {"index": index, "factor": 0.5}),
        (keep, {}),
        (go_back, {"with_optimizer": half}),
        (clip, {"max_norm": rng.choice((0.1, 100.0))}),
        (scale_gradient, {"index": index}),
        (drop_gradient, {"index": index}),
    ]
    return rng.choice(choices)
