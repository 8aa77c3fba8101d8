"""bench.train: all contestants train the same thing, the floor included."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import protrain
from bench.train.contestants import parse
from bench.train.models import blocks_of, build_model, fill, parameter_groups, shape_blocks
from bench.train.results import Outcome
from bench.train.task import BETAS, EPSILON, WEIGHT_DECAY, Job, Task, make_tokens
from bench.train.trainers import MasterAdamW, floor_trainer, protrain_trainer, resident_trainer
from bench.train.worker import BUILDERS
from protrain.cli.shapes import SHAPES
from protrain.planning import Plan
from protrain.planning.plan import BlockMode

CPU = torch.device("cpu")
TASK = Task(model="tiny", layers=3, batch=1, sequence=16, steps=4, warm_up=1, learning_rate=1e-3)


def _filled(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build_model(TASK)
    fill(model, device=CPU, dtype=dtype)
    return model


def _backward(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(256, (TASK.batch, TASK.sequence), generator=generator)
    model(input_ids=ids, labels=ids).loss.backward()


def _forwards(model: nn.Module) -> Counter[int]:
    """Counts the runs of every block's attention from now on, recomputations included."""
    runs: Counter[int] = Counter()
    for index, block in enumerate(blocks_of(model)):
        attention = block.get_submodule("self_attn")
        attention.register_forward_pre_hook(lambda *_, index=index: runs.update([index]))
    return runs


def test_weights_have_the_model_s_own_start_values_and_ties_survive() -> None:
    model = build_model(TASK)
    blocks = blocks_of(model)
    fill(blocks[0], device=CPU, dtype=torch.bfloat16)
    assert not any(parameter.is_meta for parameter in blocks[0].parameters())
    assert all(parameter.is_meta for parameter in blocks[1].parameters())
    before = [parameter.clone() for parameter in blocks[0].parameters()]
    fill(model, device=CPU, dtype=torch.bfloat16)
    for old, new in zip(before, blocks[0].parameters(), strict=True):
        assert torch.equal(old, new)  # what had values keeps them
    assert model.lm_head.weight is model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.float().std().item() == pytest.approx(0.02, rel=0.1), name


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "gpt2"])  # GPT-2's blocks set their children's residual projections
def test_everyone_begins_with_the_same_weights(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "gpt2", replace(SHAPES["gpt2"], hidden=96, vocabulary=256))
    task = replace(TASK, model=shape, layers=2)
    whole, by_block, wrapped = (build_model(task) for _ in range(3))
    fill(whole, device=CPU, dtype=torch.float32)
    for module in (*reversed(blocks_of(by_block)), by_block):  # as for FSDP2, in another order
        fill(module, device=CPU, dtype=torch.float32)
    ids = torch.zeros((1, 16), dtype=torch.long)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    wrapped, _ = protrain.wrap(wrapped, optimizer, example_batch={"input_ids": ids, "labels": ids}, device=CPU)
    expected = wrapped.state_dict()
    for model in (whole, by_block):
        found = model.state_dict()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    a, b = (dict(block.named_parameters()) for block in blocks_of(whole))
    assert [name for name in a if a[name].std() > 0 and torch.equal(a[name], b[name])] == []  # no seed twice


def test_checkpointed_blocks_run_twice_and_gradients_stay() -> None:
    plain, shaped = _filled(), _filled()
    shape_blocks(blocks_of(shaped), compile=False, checkpointed=[True, False, True])
    runs = _forwards(shaped)
    _backward(plain)
    _backward(shaped)
    assert runs == {0: 2, 1: 1, 2: 2}
    for one, other in zip(plain.parameters(), shaped.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def _planned(folder: Path) -> str:
    """A file with an outcome whose plan swaps, checkpoints and keeps one block each."""
    plan = Plan(
        n_persist=0,
        n_buffer=1,
        n_swap=1,
        n_ckpt=1,
        chunk_elements=128,
        n_chunks=1,
        block_modes=(BlockMode.SWAP, BlockMode.CKPT, BlockMode.NONE),
        model="",
        tokens=16,
        device_bytes=0,
        host_bytes=0,
        step_ms=0.0,
        transient_bytes=0,
    )
    file = folder / "protrain-eager.json"
    Outcome(contestant=parse("protrain-eager"), plan=plan).save(file)
    return str(file)


def test_the_floor_checkpoints_what_the_plan_does_and_keeps_no_gradient(tmp_path: Path) -> None:
    job = Job(task=TASK, contestant=parse("floor-eager"), tokens="", planned_by=_planned(tmp_path), until=0.0)
    ids = torch.arange(16)[None]
    torch.manual_seed(0)
    trainer = floor_trainer(job, CPU, ids)
    model = _model_of(trainer.step)
    runs = _forwards(model)
    reached: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.append(name))
    before = [parameter.clone() for parameter in model.parameters()]
    trainer.step(ids)
    assert runs == {0: 1, 1: 2, 2: 1}
    assert set(reached) == {name for name, _ in model.named_parameters()}  # backward went all the way
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert parameter.grad is None
        assert torch.equal(old, parameter)


def _model_of(step: object) -> nn.Module:
    """The model in the closure of a trainer's step."""
    cells = getattr(step, "__closure__", None) or ()
    return next(cell.cell_contents for cell in cells if isinstance(cell.cell_contents, nn.Module))


def test_masters_in_parts_are_adamw_on_the_whole() -> None:
    model, reference = _filled(), _filled()
    optimizer = MasterAdamW(model, blocks_of(model), TASK)
    groups = parameter_groups(reference, weight_decay=WEIGHT_DECAY)
    plain = torch.optim.AdamW(groups, fused=True, lr=TASK.learning_rate, betas=BETAS, eps=EPSILON)
    for seed in range(3):
        _backward(model, seed)
        _backward(reference, seed)
        optimizer.step()
        plain.step()
        plain.zero_grad()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert one.grad is None
        assert torch.equal(one, other)


@pytest.mark.slow
def test_an_adapter_is_all_that_everyone_trains() -> None:
    pytest.importorskip("peft")
    task = replace(TASK, lora="r=4")
    job = Job(task=task, contestant=parse("resident-eager"), tokens="", planned_by=None, until=inf)
    ids = torch.arange(16).view(1, 16)
    before = dict(build_model(task).named_parameters())
    frozen = {name for name, parameter in before.items() if not parameter.requires_grad}
    assert {name for name in before if "lora_" not in name} == frozen
    resident, ours = resident_trainer(job, CPU, ids), protrain_trainer(job, CPU, ids)
    start = {name: value.clone() for name, value in _model_of(ours.step).state_dict().items()}
    for _ in range(3):
        torch.testing.assert_close(*(trainer.step(ids) for trainer in (resident, ours)))  # loss and norm
    found = [_model_of(trainer.step).state_dict() for trainer in (resident, ours)]
    changed = {name for name in start if not torch.equal(found[1][name], start[name])}
    assert changed == set(before) - frozen
    # Adam enlarges the rounding of a gradient near zero up to a step, which is 1e-3. How much depends on the processor.
    assert [name for name in start if not torch.allclose(found[0][name], found[1][name], atol=1e-5)] == []


@pytest.mark.slow
def test_a_4bit_base_is_the_same_for_everyone_and_an_adapter_trains_beside_it() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    task = replace(TASK, lora="r=4", quantised="nf4")
    job = Job(task=task, contestant=parse("resident-eager"), tokens="", planned_by=None, until=inf)
    ids = torch.arange(16).view(1, 16)
    resident, ours = resident_trainer(job, CPU, ids), protrain_trainer(job, CPU, ids)
    plain = build_model(replace(TASK, lora="r=4"))
    assert resident.parameters == ours.parameters == sum(parameter.numel() for parameter in plain.parameters())
    fill(plain, device=CPU, dtype=torch.float32)
    bases = {name: value for name, value in plain.named_parameters() if name.endswith("base_layer.weight")}
    assert len(bases) == 3 * 7
    for trainer in (resident, ours):
        for name, value in bases.items():
            found = _model_of(trainer.step).get_parameter(name)
            expected, _ = bitsandbytes.functional.quantize_4bit(value.data, quant_type="nf4", compress_statistics=True)
            assert torch.equal(found, expected)
    losses = []
    for _ in range(3):
        torch.testing.assert_close(*(results := [trainer.step(ids) for trainer in (resident, ours)]))  # loss and norm
        losses.append(results[0][0].item())
    assert losses[0] > losses[1] > losses[2]


def test_float8_products_are_the_same_for_everyone(tmp_path: Path) -> None:
    pytest.importorskip("torchao.float8")
    task, ids = replace(TASK, float8=True), torch.arange(16).view(1, 16)
    found = {}
    for name in ("resident-eager", "protrain-eager", "fsdp2-eager", "floor-eager"):
        job = Job(task=task, contestant=parse(name), tokens="", planned_by=_planned(tmp_path), until=inf)
        trainer = BUILDERS[job.contestant.kind](job, CPU, ids)
        found[name] = [trainer.step(ids)[0].item() for _ in range(3)]
        kinds = Counter(type(module).__name__ for module in _model_of(trainer.step).modules())
        assert kinds["Float8Linear"] == 3 * 7
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    first, *later = zip(*(found[name] for name in ("resident-eager", "protrain-eager", "fsdp2-eager")), strict=True)
    assert len({*first, found["floor-eager"][0]}) == 1
    for losses in later:  # a weight that differs in its last bit may be rounded to the next number in float8
        assert list(losses) == pytest.approx([losses[0]] * 3, rel=3e-3)


def test_masters_keep_what_16_bit_weights_cannot() -> None:
    task = Task(model="tiny", layers=3, batch=1, sequence=16, steps=4, warm_up=1, learning_rate=3e-5)
    model = _filled(torch.bfloat16)
    weight = blocks_of(model)[0].get_submodule("input_layernorm").get_parameter("weight")
    optimizer = MasterAdamW(model, blocks_of(model), task)
    for _ in range(100):  # of 3e-5 each: far below half the distance of 1 to its neighbours, 0.002 and 0.004
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.equal(weight.float(), torch.full_like(weight, 1 - 100 * 3e-5).bfloat16().float())
    assert weight[0].item() < 1


def test_tokens_are_text_and_differ_between_steps(tmp_path: Path) -> None:
    make_tokens(TASK, tmp_path / "tokens.pt")
    tokens = torch.load(tmp_path / "tokens.pt")
    assert tokens.shape == (5, 1, 1, 16)
    assert not torch.equal(tokens[0], tokens[1])
    assert tokens.unique().numel() > 10
    assert tokens.max() < 128
