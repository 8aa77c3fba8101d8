"""What a random script may do between steps, by actions as those of ``steps``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.harness import Spec, states
from tests.random_scripts.models import WIDTH, Adapter, batch


def set_group(side: Any, group: int, key: str, value: Any) -> None:
    side.optimizer.param_groups[group][key] = value


def advance(side: Any) -> list[Any]:
    """The scheduler, if there is one, makes its step."""
    if side.scheduler is not None:
        side.scheduler.step()
    return [group["lr"] for group in side.optimizer.param_groups]


def set_adapters(side: Any, used: bool, block: int | None) -> None:
    """Adapters are switched on or off."""
    for module in (side.model if block is None else side.model.blocks[block]).modules():
        if isinstance(module, Adapter):
            module.used = used


def merge(side: Any, block: int, sign: int) -> None:
    """An adapter is merged into its layer, or taken out of it."""
    layer = side.model.blocks[block].first
    if isinstance(layer, Adapter):
        with side.whole(), torch.no_grad():
            base, up, down = (each.get_parameter("weight") for each in (layer.base, layer.up, layer.down))
            base.add_(up @ down, alpha=sign)


def freeze(side: Any, index: int, trained: bool) -> None:
    side.trained[index % len(side.trained)].requires_grad_(trained)


def freeze_block(side: Any, block: int, trained: bool) -> None:
    mine = set(map(id, side.model.blocks[block].parameters()))
    for parameter in side.trained:
        if id(parameter) in mine:
            parameter.requires_grad_(trained)


def freeze_all(side: Any, trained: bool) -> None:
    for parameter in side.trained:
        parameter.requires_grad_(trained)


def evaluate(side: Any, seed: int, size: int, inference: bool, train: bool) -> list[Any]:
    before = [module.training for module in side.model.modules()]
    side.model.train(train)
    try:
        with torch.inference_mode() if inference else torch.no_grad():
            return [side.model(batch(seed, size)).clone()]
    finally:
        for module, was in zip(side.model.modules(), before, strict=True):
            module.training = was


def read(side: Any, index: int) -> list[Any]:
    parameter = side.parameter(index)
    return [parameter.detach().clone(), parameter.norm().detach(), (parameter * 2).detach().sum()]


def set_mode(side: Any, block: int | None, train: bool) -> None:
    (side.model if block is None else side.model.blocks[block]).train(train)


def generate(side: Any, seed: int, inference: bool) -> list[Any]:
    """Forwards of a batch that grows by what comes out of them."""
    rows = batch(seed, 2)
    with torch.inference_mode() if inference else torch.no_grad():
        for _ in range(3):
            output = side.model(rows)[-1:].float()
            rows = torch.cat([rows, torch.cat([output, output.tanh()], dim=1)])
    return [rows.clone()]


def evaluate_block(side: Any, block: int, seed: int) -> list[Any]:
    hidden = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return [side.model.blocks[block](hidden.to(side.model.leave.weight.dtype)).clone()]


def look(side: Any) -> list[Any]:
    """All weights and states, perhaps in the middle of a step."""
    return [value for _, value in sorted(states(side.model, side.optimizer).items())]


def load_weight(side: Any, index: int, values: int) -> None:
    """A state of one weight alone is loaded."""
    weight = side.parameter(index)
    value = torch.randn(weight.shape, generator=torch.Generator().manual_seed(values)) * 0.1
    side.load_some({side.named(index): value.to(weight.dtype)})


def go_back(side: Any, with_optimizer: bool) -> None:
    if side.snapshot is not None:
        side.go_back(with_optimizer=with_optimizer)


def resume(side: Any, spec: Spec, folder: Path) -> None:
    """A new model, under another plan, goes on from a checkpoint. Hooks do not move along."""
    side.give_up()
    side.resume(spec, folder)
    unhook(side)  # only now, as a resumption that is refused changes nothing


def _double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def _halve_all(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in of_inputs)


def _halve_later(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * 0.5)


# By kind: how it is registered at a block.
_HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda block: block.register_forward_hook(_double),
    "forward of a layer": lambda block: block.first.register_forward_hook(_double),
    "before forward": lambda block: block.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 0.5,)),
    "backward": lambda block: block.register_full_backward_hook(_halve_all),
    "before backward": lambda block: block.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 0.5,)),
    "gradient": lambda block: block.second.weight.register_hook(lambda gradient: gradient * 0.5),
    "gradient of the output": lambda block: block.register_forward_hook(_halve_later),
}
HOOKS = tuple(_HOOKS)


def hook(side: Any, block: int, kind: str) -> None:
    side.handles.append(_HOOKS[kind](side.model.blocks[block]))


def unhook(side: Any) -> None:
    while side.handles:
        side.handles.pop().remove()
