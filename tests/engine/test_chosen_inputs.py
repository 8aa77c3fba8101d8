"""``backward(inputs=...)`` brings gradients to the parameters that it names, wherever they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.engine.harness import FEW_PLANS, Trainer, adamw, assert_same, default_loss, states, wrap_under
from tests.engine.plain_loop import prepare_plain
from tests.engine.residual import batches, make


def train(model: nn.Module, optimizer: Trainer) -> dict[str, Tensor]:
    """A step of two blocks, one of the last layer and a leaf that is not the model's, one of a single parameter."""
    torch.manual_seed(1)
    own = [parameter for name, parameter in model.named_parameters() if "blocks.1" in name or "blocks.3" in name]
    leaves = []
    for given in batches(3):
        leaf = torch.ones((), device=own[0].device, requires_grad=True)
        batch = tuple(value.to(leaf.device) for value in given)
        default_loss(model, batch).backward(inputs=own)
        optimizer.step()
        optimizer.zero_grad()
        weight = model.get_parameter("leave.weight")
        (default_loss(model, batch) * leaf).backward(inputs=[weight, leaf])
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        default_loss(model, batch).backward(inputs=weight)
        optimizer.step()
        optimizer.zero_grad()
        leaves.append(float(leaf.grad) if leaf.grad is not None else -1.0)
    return {**states(model, optimizer), "leaves": torch.tensor(leaves)}


def test_backward_with_chosen_inputs(device: torch.device) -> None:
    model = make()
    expected = train(*prepare_plain(model, adamw(model), device=device, dtype=torch.float32))
    for spec in FEW_PLANS:
        model = make()
        found = train(*wrap_under(spec, model, adamw(model), batches(1)[0], device=device))
        assert_same(found, expected, where=str(spec))
