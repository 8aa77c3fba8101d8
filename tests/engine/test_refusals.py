"""What protrain.wrap refuses of models, optimizers and arguments, with an error that names the thing and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import protrain
from tests.engine.harness import adamw, default_loss
from tests.engine.refusing import refused
from tests.engine.residual import batches, make

BATCH = batches(1)[0]


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": [BATCH[0]]}, r"a batch must be a mapping .* or a tuple .*, not list"),
        ({"device_memory": "24 apples"}, "device_memory must be .* text like '24GiB', not '24 apples'"),
        ({"host_memory": -1}, "host_memory must be at least 1 KiB .*not -1"),
        ({"dtype": "float64"}, "dtype must be bfloat16, float16 or float32, not 'float64'"),
        ({"device": "tpu"}, "device must be a CUDA GPU or the CPU, not 'tpu'"),
        ({"device": "meta"}, "device must be a CUDA GPU or the CPU, not meta"),
        ({"dtype": "float16", "step_during_backward": True}, "step_during_backward=True .*float16.*use bfloat16"),
        ({"accumulation": 0}, "accumulation must be 1 or more, the backward\\(\\) calls of a step, not 0"),
        ({"moment_dtype": "float16"}, "moment_dtype must be float32 or bfloat16, not 'float16'"),
    ],
)
def test_wrong_arguments(options: Any, words: str) -> None:
    model, options = make(), {"batch": BATCH, **options}
    refused(model, adamw(model), words=words, kind=ValueError, **options)


# -- the optimizer -----------------------------------------------------------------------------------------------------


class Customised(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "must be torch.optim.AdamW or torch.optim.Adam, not SGD"),
        (lambda p: Customised(p), "must be torch.optim.AdamW or torch.optim.Adam, not Customised"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), r"amsgrad=True of Adam.* is not supported: pass amsgrad=False"),
        (lambda p: torch.optim.Adam(p, maximize=True), r"maximize=True of Adam.* is not supported: pass max"),
    ],
)
def test_optimizers_that_are_not_adam(optimizer: Callable[[Any], torch.optim.Optimizer], words: str) -> None:
    model = make()
    refused(model, optimizer(model.parameters()), BATCH, words, ValueError)


class WithOne(nn.Module):
    """Has one parameter or buffer beside an ordinary layer."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if isinstance(tensor, nn.Parameter):
            self.other = tensor
        else:
            self.register_buffer("other", tensor)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class Own(Tensor):
    """A class of its own."""


class DTensor(Tensor):
    """As one of torch.distributed is called, which needs processes."""


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Parameter(torch.ones(4, dtype=torch.complex64)), r"is torch\.complex64.*torch\.view_as_real"),
        (lambda: nn.Parameter(torch.ones(4).to(torch.float8_e5m2)), r"is torch\.float8_e5m2, and only bfloat16"),
        (lambda: nn.Parameter(torch.ones(4).as_subclass(Own)), "is a Own, and only.*adapters"),
        (lambda: nn.Parameter(torch.eye(4).to_sparse()), r"is torch\.sparse_coo.*keep a dense one"),
        (lambda: nn.Parameter(torch.eye(4).to_sparse_csr(), requires_grad=False), r"is torch\.sparse_csr.*a dense one"),
        (lambda: nn.Parameter(_nested()), "is a nested tensor.*a dense one"),
        (lambda: nn.Parameter(torch.ones(4).as_subclass(DTensor)), "is a DTensor, which lies on several.*full_tensor"),
        (_nested, "buffer other is a nested tensor.*a dense one"),
    ],
)
def test_tensors_of_kinds_that_cannot_be_trained_or_placed(make: Callable[[], Tensor], words: str) -> None:
    model = WithOne(make())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=words) as caught:
        protrain.wrap(model, optimizer, example_batch=(torch.ones(2, 4),), device="cpu", progress=False)
    assert re.match("(parameter|buffer) other is", str(caught.value))


def test_gradients_from_before() -> None:
    model = make()
    optimizer = adamw(model)
    default_loss(model, BATCH).backward()
    with pytest.raises(ValueError, match=r"has a gradient already.*call optimizer\.zero_grad\(\) before"):
        protrain.wrap(model, optimizer, example_batch=BATCH, device="cpu", progress=False)
    optimizer.zero_grad()
    protrain.wrap(model, optimizer, example_batch=BATCH, device="cpu", progress=False)


def test_wrapping_twice() -> None:
    model = make()
    options: Any = {"example_batch": BATCH, "device": "cpu", "progress": False}
    wrapped, optimizer = protrain.wrap(model, adamw(model), **options)
    for again in (optimizer, torch.optim.AdamW(wrapped.parameters())):
        with pytest.raises(ValueError, match=r"weight belongs to a wrapped model already: use the model and"):
            protrain.wrap(wrapped, again, **options)
    default_loss(wrapped, BATCH).backward()
    optimizer.step()


def test_parameters_in_no_group_are_announced() -> None:
    model = make()
    head = model.get_parameter("leave.weight")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not head], lr=1e-2)
    options: Any = {"example_batch": BATCH, "device": "cpu", "progress": False}
    with pytest.warns(UserWarning, match="1 parameters require a gradient but are in no optimizer group.*leave.weight"):
        wrapped, trainer = protrain.wrap(model, optimizer, **options)
    before = wrapped.state_dict()
    default_loss(wrapped, BATCH).backward()
    trainer.step()
    changed = {name for name, value in wrapped.state_dict().items() if not value.equal(before[name])}
    assert changed == before.keys() - {"leave.weight"}


def transposed_weight(first: nn.Linear, second: nn.Linear) -> None:
    second.weight = nn.Parameter(first.weight.detach().T, requires_grad=False)


def buffer_of_a_weight(first: nn.Linear, second: nn.Linear) -> None:
    second.register_buffer("kept", first.weight.detach())


@pytest.mark.parametrize("share", [transposed_weight, buffer_of_a_weight])
def test_a_trained_parameter_in_the_memory_of_another_tensor(share: Callable[..., None]) -> None:
    words = "0.weight and 1.* share memory without being one parameter.*module.weight = other.weight.*clone"
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    share(*model)
    refused(model, adamw(model), (torch.ones(2, 4),), words, ValueError)
    with protrain.empty_parameters():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        share(*model)
    with pytest.raises(ValueError, match=words):
        protrain.wrap(model, adamw(model), example_batch=(torch.ones(2, 4),), device="cpu", progress=False)


def test_tensors_that_lie_beside_each_other_or_are_frozen_may_share_memory() -> None:
    first, second, memory = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(2, 4, 4)
    first.weight, second.weight = nn.Parameter(memory[0]), nn.Parameter(memory[1])  # as in a file that is mapped
    bias = torch.ones(4)
    first.bias, second.bias = (nn.Parameter(bias, requires_grad=False) for _ in range(2))
    model = nn.Sequential(first, second)
    protrain.wrap(model, adamw(model), example_batch=(torch.ones(2, 4),), device="cpu", progress=False)
    assert torch.equal(second.bias.detach(), bias)


# -- models ------------------------------------------------------------------------------------------------------------


class _Reversible(nn.Module):
    """Blocks whose modules are called again in a backward of their own."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, block: nn.Sequential) -> Tensor:
            ctx.block = block
            ctx.save_for_backward(x)
            result: Tensor = block(x)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                ctx.block[0](x).backward(gradients[0])
            return x.grad, None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Identity()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = self.Again.apply(x, block)
        return x


def no_gradients() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


def compiled(path: str | None) -> Callable[[], Any]:
    """A module that is compiled itself, or has such a part."""

    def make() -> Any:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
        if path is None:
            return torch.compile(model)
        model.get_submodule(path).compile()
        return model

    return make


def again_inside_backward(reentrant: bool) -> Callable[[], nn.Module]:
    class Checkpointing(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            x = input.clone().requires_grad_()
            for block in self:
                x = checkpoint(lambda x, block=block: torch.tanh(block(x)), x, use_reentrant=reentrant)
            return x

    return lambda: Checkpointing(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))


COMPILED = "is compiled by torch.compile.*as it was before, and compile=True"
AGAIN = r"the model itself computes 2 again inside backward: take out torch\.utils\.checkpoint"
MODELS: list[tuple[Callable[[], nn.Module], str]] = [
    (compiled(None), COMPILED),
    (compiled(""), COMPILED),
    (compiled("1"), COMPILED),
    (again_inside_backward(False), AGAIN),
    (again_inside_backward(True), AGAIN),
    (lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))), "module '?1'? is a ScriptModule"),
    (lambda: nn.DataParallel(nn.Linear(4, 4)), "is a DataParallel.*wrap the module inside"),
    (_Reversible, r"the backward of _Reversible uses a weight while the block that owns it does not run"),
    (no_gradients, "nothing to train"),
]


@pytest.mark.parametrize(("make", "words"), MODELS)
def test_models_that_cannot_be_trained(make: Callable[[], nn.Module], words: str) -> None:
    model = make()
    refused(model, torch.optim.AdamW(model.parameters()), (torch.ones(2, 4),), words, ValueError)
