"""wrap(compile=True): one graph for all blocks, the same bits under every plan, nothing left of a failed wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import protrain
from protrain.forward.compilation import compile_blocks
from protrain.profiler.blocks import find_blocks
from tests.engine.harness import FEW_PLANS, Loop, adamw, check_equal_to_plain, generate_no_code

Build = Callable[[str], nn.Module]
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[None]:
    """Code is generated on a GPU alone."""
    torch._dynamo.reset()
    if device.type == "cpu":
        generate_no_code(monkeypatch)
    yield
    torch._dynamo.reset()


def test_compiled_blocks_have_the_bits_of_a_compiled_plain_model(
    tiny_model: Build, tiny_batch: Callable[..., Batch], device: torch.device
) -> None:
    batches = [tiny_batch(seed=seed) for seed in range(4)]

    def compiled() -> nn.Module:
        model = tiny_model("llama")
        compile_blocks([model.get_submodule(path) for path in find_blocks(model)])
        return model

    counters.clear()
    how: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "accumulation": 2, "compile": True}
    make, run = partial(tiny_model, "llama"), Loop(max_norm=0.5, accumulate=2).run
    check_equal_to_plain(make, batches, make_plain=compiled, run=run, specs=FEW_PLANS[::2], **how)
    assert counters["stats"]["unique_graphs"] == 1, "compiled again for another block, placement or plan"
    assert not counters["graph_break"]


@pytest.mark.slow
def test_evaluation_compiles_nothing(tiny_model: Build, tiny_batch: Callable[..., Batch], device: torch.device) -> None:
    model = tiny_model("llama")
    batch = tiny_batch()
    wrapped, _ = protrain.wrap(
        model, adamw(model), example_batch=batch, device=device, compile=True, progress=False, host_memory="4GiB"
    )
    counters.clear()
    wrapped.eval()
    with torch.no_grad():
        for length in (3, 5, 7):
            wrapped(input_ids=batch["input_ids"][:, :length].to(device))
        generate: Any = wrapped.generate
        generate(batch["input_ids"][:1, :4].to(device), max_new_tokens=4, do_sample=False)
    assert not counters["frames"]


def test_a_compiled_block_saves_operands_of_products_only_where_computing_them_again_would_take_long(
    device: torch.device,
) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.both = nn.RMSNorm(32), nn.Linear(32, 128, bias=False)
            self.down = nn.Linear(64, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.both(self.norm(x)).chunk(2, dim=-1)
            return x + self.down(nn.functional.silu(gate) * up)

    block, x = Gated().to(device), torch.randn(8, 32, device=device, requires_grad=True)
    weights = {weight.data_ptr() for weight in block.parameters()}

    def saved_elements() -> int:
        found: dict[int, int] = {}

        def pack(saved: Tensor) -> Tensor:
            found[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes() // 4
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            result = block(x)
        result.sum().backward()
        return sum(elements for at, elements in found.items() if at not in weights)

    # The norm and its inverse root, both halves of the product, and for each half what silu and the product return.
    eager = saved_elements()
    undo = compile_blocks([block])
    compiled = saved_elements()
    undo()
    assert compiled == 8 * (32 + 1 + 128)  # x, the norm's inverse root, and the product's result
    assert compiled < eager


def test_a_compiled_block_may_have_a_forward_of_its_own_that_is_no_method(device: torch.device) -> None:
    blocks = [nn.Linear(4, 4).to(device) for _ in range(2)]
    vars(blocks[1])["forward"] = doubled = lambda given: 2 * given
    given = torch.randn(2, 4, device=device)
    expected = [block(given) for block in blocks]
    put_back = compile_blocks(blocks)
    assert all(torch.equal(block(given), each) for block, each in zip(blocks, expected, strict=True))
    put_back()
    assert "forward" not in vars(blocks[0])
    assert blocks[1].forward is doubled
