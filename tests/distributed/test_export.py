"""Several ranks write one Hugging Face folder or adapter, and bring the full state to one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import protrain
import protrain.checkpoint.export as exporting
from protrain.cli import models
from protrain.cli.main import main
from tests.distributed.pool import import_in_pools, on_ranks
from tests.distributed.test_bits import SPECS, of_family
from tests.distributed.training import Training, step
from tests.engine.harness import assert_same
from tests.tiny_models import tiny

FILE_BYTES = 20_000  # so that the small model makes several files


def _trained(rank: int, size: int) -> tuple[Any, Any]:
    training = Training(rank, size, SPECS[2], **of_family("llama", dtype="bfloat16", micro_batches=size))
    training.train(range(2))
    return training.model, training.optimizer


def export_and_save(rank: int, size: int, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    """Train, export the model, fail to export it again, and save a checkpoint. Returns the weights and the errors."""
    model, optimizer = _trained(rank, size)
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "FILE_BYTES", 4 * FILE_BYTES)
        protrain.export(model, Path(folder, "exported"))
        for target in ("exported", "file/below"):
            try:
                protrain.export(model, Path(folder, target))
            except (OSError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")
    protrain.save_checkpoint(Path(folder, "checkpoints"), model, optimizer)
    return dict(model.state_dict()), errors


def bring_to_first(rank: int, size: int) -> tuple[Any, Any, Any, Any]:
    """The full states of model and optimizer, and what ``state_dict`` gives."""
    model, optimizer = _trained(rank, size)
    found = protrain.full_state_dict(model), optimizer.full_state_dict()
    dist.barrier()
    return *found, model.state_dict(), optimizer.state_dict()


transformers = pytest.importorskip("transformers")


@pytest.mark.slow
def test_from_pretrained_reads_what_ranks_have_exported_or_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    found = on_ranks(3, export_and_save, 3, str(tmp_path))
    weights = found[0][0]
    assert not torch.equal(weights["lm_head.weight"], tiny("llama").state_dict()["lm_head.weight"].bfloat16())
    for _, errors in found:
        assert [error.partition(":")[0] for error in errors] == ["ValueError", "NotADirectoryError"]
        assert "exported is not empty: give a folder of its own" in errors[0]
    exported = tmp_path / "exported"
    files = sorted(path.name for path in exported.glob("*.safetensors"))
    assert len(files) > 3
    assert all((exported / name).stat().st_size < 2 * FILE_BYTES for name in files)

    tiny("llama").save_pretrained(tmp_path / "source")
    arguments = ["export", str(tmp_path / "checkpoints"), str(tmp_path / "again")]
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "required: --model" in capsys.readouterr().err
    assert main([*arguments, "--model", str(tmp_path / "source")]) == 0
    assert (
        main([*arguments[:2], str(tmp_path / "wide"), "--model", str(tmp_path / "source"), "--dtype", "float32"]) == 0
    )

    for folder in (exported, tmp_path / "again"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.dtype is torch.bfloat16
        assert_same(loaded.state_dict(), weights, where=folder.name)
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype="auto").state_dict()
    assert any(not torch.equal(wide[name], weights[name].float()) for name in weights), "it has the masters"
    for name, weight in weights.items():
        torch.testing.assert_close(wide[name], weight.float(), rtol=2**-8, atol=0)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"again", "checkpoints", "exported", "file", "source", "wide"}, "no hidden folder is left"


def test_the_full_state_is_on_the_first_rank_alone() -> None:
    (weights, states, all_weights, all_states), *others = on_ranks(2, bring_to_first, 2)
    assert_same(weights, all_weights)
    assert states["param_groups"] == all_states["param_groups"]
    assert states["state"].keys() == all_states["state"].keys() == set(range(len(weights)))
    for index, state in all_states["state"].items():
        found = {kind: torch.as_tensor(value) for kind, value in states["state"][index].items()}
        assert_same(found, {kind: torch.as_tensor(value) for kind, value in state.items()}, where=str(index))
    assert [(weights, states) for weights, states, *_ in others] == [({}, {})]


# -- adapters ----------------------------------------------------------------------------------------------------------


peft = pytest.importorskip("peft")


def wrapped(folder: str, ids: torch.Tensor) -> tuple[Any, Any]:
    config = transformers.AutoConfig.from_pretrained(f"{folder}/source")
    with protrain.empty_parameters():
        model = transformers.LlamaForCausalLM(config)
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"), model)
    return protrain.wrap(
        model,
        models.adamw(model),
        example_batch={"input_ids": ids, "labels": ids},
        device="cpu",
        device_memory="1MiB",
        weights=f"{folder}/source",
        progress=False,
    )


def train(rank: int, folder: str) -> None:
    ids = torch.arange(16).view(2, 8) + rank
    model, optimizer = wrapped(folder, ids)
    step(model, optimizer, {"input_ids": ids, "labels": ids})
    protrain.save_checkpoint(f"{folder}/checkpoints", model, optimizer, base="source")
    protrain.export(model, f"{folder}/adapter")


@pytest.mark.slow
def test_two_ranks_write_an_adapter_that_peft_merges(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "source")
    import_in_pools("peft")
    on_ranks(2, train, str(tmp_path))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    changed = [name for name, value in merged.items() if not torch.equal(before[name], value)]
    assert len(changed) == 3 * 7, "every linear layer of all blocks is trained"

    model, optimizer = wrapped(str(tmp_path), torch.arange(16).view(2, 8))
    with pytest.raises(protrain.CheckpointError, match="holds an adapter and not the weights of 'source'"):
        protrain.load_checkpoint(tmp_path / "checkpoints", model, optimizer)
    protrain.load_checkpoint(tmp_path / "checkpoints", model, optimizer, base="source")
    protrain.export(model, tmp_path / "loaded")
    name = "adapter_model.safetensors"
    assert (tmp_path / "loaded" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()
