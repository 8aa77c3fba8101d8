"""What the profile accepts the engine runs: with much memory, with little, and under every kind of plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError, PlanError
from tests.engine import awkward
from tests.engine.harness import (
    CKPT,
    NONE,
    PLANS,
    SWAP,
    Batch,
    Loop,
    MakeModel,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    plain_run,
    seeded,
    states,
    wrap_under,
)

CPU = torch.device("cpu")
SPECS = (*PLANS[9:12], PLANS[14], PLANS[16])  # every block mode away from the device, packed, and with attention kept
MODELS: dict[str, Callable[[], nn.Module]] = {
    "looks twice": partial(awkward.make, awkward.LooksTwice),
    "sparse": partial(awkward.make, awkward.Sparse),
    "sparse rows": partial(awkward.make, awkward.SparseRows),
    "sparse weight": partial(awkward.make, awkward.SparseWeight),
    "sparse weight rows": partial(awkward.make, awkward.SparseWeightRows),
    "sparse outside": awkward.make_sparse_outside,
    "nested": partial(awkward.make, awkward.Nested),
    "counts": partial(awkward.make, awkward.Counts),
    "initialises": partial(awkward.make, awkward.Initialises),
}
VIEWS = {f"weight.{view}": partial(awkward.make, view=view) for view in ("T", "mT", "H", "data")}


def check_automatic_plans(make: MakeModel, batches: list[Batch]) -> None:
    """The plain loop's bits under the plans that ``wrap`` finds for all memory, and for the least that it asks for."""
    expected, final = plain_run(make, batches, loop=Loop(), device=CPU, dtype=torch.float32)
    model = make()
    wrap: Any = partial(protrain.wrap, example_batch=batches[0], device="cpu", progress=False)
    with pytest.raises(PlanError) as least:
        wrap(model, adamw(model), device_memory=1024)
    for device_memory in (None, least.value.needed_bytes):
        model = make()
        wrapped, trainer = wrap(model, adamw(model), device_memory=device_memory)
        assert Loop().run(wrapped, trainer, batches) == expected, str(trainer.plan)
        assert_same(states(wrapped, trainer), final, where=str(trainer.plan))


@pytest.mark.parametrize("name", [*MODELS, "weight.T"])
def test_plans_that_are_found(name: str) -> None:
    check_automatic_plans((MODELS | VIEWS)[name], awkward.batches(2))


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_plan(name: str, device: torch.device) -> None:
    if name == "sparse weight rows" and device.type == "cuda":
        pytest.skip("torch's own backward of a CSR product fails there when operators are to be deterministic")
    check_equal_to_plain(MODELS[name], awkward.batches(2), device=device, specs=SPECS)


@pytest.mark.parametrize(("view", "part"), zip(VIEWS, (0, 1, 1, 0), strict=True))
def test_views_of_a_weight(view: str, part: int, device: torch.device) -> None:
    check_equal_to_plain(VIEWS[view], awkward.batches(2), device=device, specs=SPECS[part::2])


@pytest.mark.parametrize("mode", [NONE, CKPT, SWAP], ids=str)
def test_numbers_that_are_not_drawn_from_torch(mode: Any) -> None:
    import numpy as np

    def seeded_loss(model: nn.Module, batch: Batch) -> Tensor:
        np.random.seed(int(batch[0].sum().abs() * 1000))
        loss: Tensor = model(*batch)
        np.random.random()  # backward must not depend on what is drawn in between
        return loss

    make, specs = partial(awkward.make, awkward.Draws), (Spec("none", "least", (mode,)),)
    check_equal_to_plain(make, awkward.batches(2), device=CPU, loop=Loop(loss=seeded_loss), specs=specs)


class Prefix(nn.Module):
    """Prefix tuning: learned keys and values go to every layer of a frozen model in a cache."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        self.config_of_model = transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.model = transformers.LlamaForCausalLM(self.config_of_model).requires_grad_(False)
        self.prefix = nn.Parameter(torch.randn(4, 2, 2, 4, 8) * 0.1)
        self.cache_class = transformers.DynamicCache

    def forward(self, ids: Tensor) -> Tensor:
        cache = self.cache_class(config=self.config_of_model)
        for layer, (keys, values) in enumerate(self.prefix):
            cache.update(keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1), layer)
        mask = torch.ones(len(ids), 4 + ids.shape[1], device=ids.device)
        output: Any = self.model(ids, labels=ids, past_key_values=cache, attention_mask=mask, use_cache=False)
        loss: Tensor = output.loss
        return loss


def make_prefix() -> nn.Module:
    with seeded():
        return Prefix()


def texts() -> list[Batch]:
    return [(torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(seed)),) for seed in range(2)]


def test_a_prefix_in_a_cache_under_plans_that_are_found() -> None:
    check_automatic_plans(make_prefix, texts())


def test_a_prefix_in_a_cache_under_every_kind_of_plan(device: torch.device) -> None:
    check_equal_to_plain(make_prefix, texts(), device=device, specs=SPECS)


def test_offsets_that_a_block_makes_are_refused_in_both() -> None:
    words = r"blocks\.3 makes the offsets of a nested tensor itself.*pass them to it"
    model: Any = awkward.make(awkward.OwnOffsets)
    batch = awkward.batches(1)[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MisuseError, match=words):
        protrain.wrap(model, adamw(model), example_batch=batch, device="cpu", progress=False)
    assert_same(model.state_dict(), before)
    for block in model.blocks:
        block.makes = False
    wrapped, _ = wrap_under(Spec("none", "least", (CKPT,)), model, adamw(model), batch, device=CPU)
    for block in model.blocks:
        block.makes = True
    with pytest.raises(MisuseError, match=words):
        wrapped(*batch).backward()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["sparse", "sparse rows", "nested"])
def test_sparse_and_nested_tensors_leave_the_device_where_the_plan_says_so(name: str, packed: bool) -> None:
    batches, spec = awkward.batches(2), Spec("none", "least", (SWAP,), packed=packed)
    expected, final = plain_run(MODELS[name], batches, loop=Loop(), device=CPU, dtype=torch.float32)
    model = MODELS[name]()
    wrapped, trainer = wrap_under(spec, model, adamw(model), batches[0], device=CPU, tight=True)
    assert Loop().run(wrapped, trainer, batches) == expected
    assert_same(states(wrapped, trainer), final)
