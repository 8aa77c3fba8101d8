"""Draws random scripts."""

from __future__ import annotations

import random
from typing import Any

from tests.engine.harness import PLANS
from tests.random_scripts import between, steps
from tests.random_scripts.models import DEPTH
from tests.random_scripts.sides import Case

Action = tuple[steps.Act, dict[str, Any]]

WITH_A_BATCH = frozenset(
    {
        *(steps.backward, steps.backward_no_sync, steps.plain_backward, steps.backward_of_list),
        *(steps.backward_to_weight, steps.forward_alone, steps.forward_for_later, steps.forward_for_two),
        *(steps.backward_of_pending, steps.drop_pending, steps.clip_unless_finite, steps.fail),
        *(steps.gradient_of_input, steps.gradient_of_weight),
        *(between.evaluate, between.evaluate_block, between.generate),
    }
)
WITH_A_FOLDER = frozenset({between.resume, "keep"})
_OF_ONE_PROCESS = frozenset({steps.backward_twice, steps.backward_of_parts, steps.step_with_closure, between.read})
_UNDER = frozenset(
    {
        *(steps.step_and_zero, steps.clip, between.load_weight, between.look, between.go_back),
        *("clip_by_torch", "scale_gradients", "edit", "read_all"),
    }
)
_NOT_LATE = frozenset({"edit_outside"})  # before the first call weights can be written
# An update cannot be taken back.
_NOT_INSIDE = frozenset({steps.backward_twice, steps.backward_of_parts, steps.clip_unless_finite})


def draw(rng: random.Random, case: Case) -> list[Action]:
    """A script of some steps, with other things before, between and after them."""
    found: list[Action] = []
    for _ in range(rng.choice((3, 5, 8))):
        while rng.random() < 0.5:
            found.append(_other(rng))
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            found.append((rng.choice((steps.backward_no_sync, steps.backward)), _loss(rng)))
            if rng.random() < 0.2:
                found.append(_other(rng))
        found.append(_last_backward(rng))
        if rng.random() < 0.2:
            found.append(_other(rng))
        if rng.random() < 0.5:
            found.append((rng.choice((steps.clip, "clip_by_torch")), {"max_norm": rng.choice((0.1, 100.0))}))
        if rng.random() < 0.2:
            found.append(_other(rng))
        found.append((steps.step_and_leave_zeros if rng.random() < 0.2 else steps.step_and_zero, {}))
    found = [_under(rng, each) if each[0] in _UNDER and rng.random() < 0.15 else each for each in found]
    if case.inside:
        found = [each for each in found if each[0] not in _NOT_INSIDE and each[1].get("where") != "backward"]
        found = [each for each in found if not each[1].get("retained")]
        if case.ranks > 1:  # some losses are refused in the middle of backward
            found = [each for each in found if each[1].get("kind") not in ("part", "by hand")]
    if case.model == "stateful":  # torch changes the buffers once more when it recomputes a block, which is not right
        found = [each for each in found if each[1].get("kind") not in ("checkpointed", "reentrant")]
    if case.model == "routed":  # whose batches do not all reach each block
        of_one = steps.backward_to_weight, steps.gradient_of_weight, steps.fail
        found = [each for each in found if each[0] not in of_one]
        unlike = steps.OF_ONE_PROCESS if case.ranks > 1 else ("weight penalty",)  # which not all ranks refuse
        found = [each for each in found if each[1].get("kind") not in unlike]
    if case.ranks > 1:
        found = [each for each in found if each[0] not in _OF_ONE_PROCESS and rng.random() < _share(each[1])]
    if case.late:  # the batch of the first call must be the longest
        found = [each for each in found if each[0] not in _NOT_LATE]
        if case.ranks > 1:  # each rank keeps the gradients of parts that are called before the model
            parts = "by hand", "block", "reentrant", "checkpointed"
            found = [each for each in found if each[1].get("kind") not in parts]
        found = [(each, {**options, "size": 8} if "size" in options else options) for each, options in found]
        # Until the first call weights have their own type, and no step is made inside backward. A first call that fails
        # does so in the profile, which changes no buffer.
        if case.dtype.itemsize < 4 or case.inside or case.model == "stateful":
            found.insert(0, (steps.backward, {"kind": "usual", "seed": 0, "size": 8, "block": 0}))
    return found


def _under(rng: random.Random, action: Action) -> Action:
    return steps.under, {"context": rng.choice(steps.CONTEXTS), "action": action[0], "options": action[1]}


def _share(options: dict[str, Any]) -> float:
    """The share of actions with ``options`` that scripts on ranks keep: most losses that ranks refuse are left out."""
    return 0.3 if options.get("kind") in steps.OF_ONE_PROCESS else 1.0


def told(action: Action) -> str:
    """``action`` as it would be written."""
    options = [
        f"{key}={value if key == 'spec' else getattr(value, '__name__', repr(value))}"
        for key, value in action[1].items()
    ]
    name = action[0] if isinstance(action[0], str) else action[0].__name__
    return f"{name}({', '.join(options)})"


def _size(rng: random.Random) -> int | tuple[int, ...]:
    """The rows of a batch, perhaps others on every rank."""
    return rng.choice((8, 8, 8, 5, 3, (8, 5, 3), (3, 8, 8)))


def _loss(rng: random.Random) -> dict[str, Any]:
    kind, block = rng.choice(steps.KINDS), rng.randrange(DEPTH)
    return {"kind": kind, "seed": rng.randrange(6), "size": _size(rng), "block": block}


def _last_backward(rng: random.Random) -> Action:
    usual, where = rng.random() < 0.8, {"seed": rng.randrange(6), "size": _size(rng)}
    if usual:
        return rng.choice((steps.backward,) * 3 + (steps.plain_backward, steps.backward_twice)), _loss(rng)
    more: tuple[Action, ...] = (
        (steps.backward_of_parts, where),
        (steps.backward_of_list, where),
        (steps.backward_to_weight, {**where, "block": rng.randrange(2)}),  # which all batches reach
        (steps.clip_unless_finite, {"seed": 3}),
        (steps.step_with_closure, _loss(rng)),
    )
    return rng.choice(more)


def _other(rng: random.Random) -> Action:
    block, index, half = rng.randrange(DEPTH), rng.randrange(4 + 6 * DEPTH), rng.random() < 0.5
    group, size = rng.randrange(2), rng.choice((8, 3, 12, (8, 3, 5)))
    max_norm = rng.choice((0.1, 100.0))
    kinds: tuple[list[Action], ...] = (
        [
            (between.set_group, {"group": group, "key": "lr", "value": rng.choice((0.0, 1e-3, 1e-2))}),
            (between.set_group, {"group": group, "key": "weight_decay", "value": rng.choice((0.0, 0.1))}),
            (between.set_group, {"group": group, "key": "betas", "value": rng.choice(((0.9, 0.95), (0.5, 0.9)))}),
            (between.set_group, {"group": group, "key": "eps", "value": rng.choice((1e-8, 1e-3))}),
            (between.freeze, {"index": index, "trained": half}),
            (between.freeze_block, {"block": block, "trained": half}),
            (between.freeze_all, {"trained": rng.random() < 0.8}),
            (between.set_mode, {"block": rng.choice((None, block)), "train": half}),
            (between.hook, {"block": block, "kind": rng.choice(between.HOOKS)}),
            (between.unhook, {}),
        ],
        [
            ("schedule", {"kind": rng.choice(("cycle", "factor", "sequence"))}),
            (between.advance, {}),
            (between.advance, {}),
            (between.set_adapters, {"used": half, "block": rng.choice((None, block))}),
            (between.merge, {"block": block, "sign": rng.choice((1, -1))}),
        ],
        [
            (between.evaluate, {"seed": 7, "size": size, "inference": half, "train": rng.random() < 0.3}),
            (between.evaluate_block, {"block": block, "seed": 4}),
            (between.generate, {"seed": 5, "inference": half}),
            (between.read, {"index": index}),
            ("read_all", {}),
            (between.look, {}),
        ],
        [
            (between.resume, {"spec": rng.choice(PLANS)}),
            ("edit", {"index": index, "factor": 0.5, "outer": half}),
            ("edit_outside", {"index": index, "how": rng.choice(("in place", "data", "replaced", "foreach", "init"))}),
            (between.load_weight, {"index": index, "values": 1}),
            ("copy_block", {"source": block, "target": rng.randrange(DEPTH)}),
            ("keep", {"how": rng.choice(("states", "states", "checkpoint", "thread"))}),
            (between.go_back, {"with_optimizer": half}),
            (between.go_back, {"with_optimizer": half}),
        ],
        [
            (steps.fail, {"block": block, "where": rng.choice(("forward", "backward")), "seed": 1, "interrupt": half}),
            (steps.gradient_of_input, {"seed": 2, "size": size}),
            (steps.gradient_of_weight, {"seed": 2, "block": block}),
            (steps.forward_alone, _loss(rng)),
            (steps.forward_for_later, _loss(rng)),
            (steps.forward_for_two, {"seed": 3, "size": size}),
            (steps.backward_of_pending, {"last": half, "retained": rng.random() < 0.5}),
            (steps.backward_of_pending, {"last": half, "retained": False}),
            (steps.drop_pending, {}),
        ],
        [
            ("zero_grad", {}),
            (steps.leave_zeros, {}),
            (steps.step, {}),
            (steps.clip, {"max_norm": max_norm}),
            ("clip_by_torch", {"max_norm": max_norm}),
            ("scale_gradient", {"index": index}),
            ("scale_gradients", {"factor": rng.choice((0.5, 2.0))}),
            ("gradient_norm", {"index": index}),
            ("drop_gradient", {"index": index}),
            ("drop_gradients_of", {"block": block}),
        ],
    )
    return rng.choice(rng.choice(kinds))
