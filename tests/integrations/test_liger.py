"""``use_liger_kernel`` of TRL's trainers on ProTrain. Liger's kernels are interpreted, as all are in the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integrations.clients import is_before, make, train


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the interpreter what Liger's kernels need of it, and take back what Liger changes for all models."""
    pytest.importorskip("liger_kernel")
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from transformers.models.llama import modeling_llama
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            value = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(value, tl.float32)
        return convert(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert_floats)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda value, **_: 1.0 / tl.sqrt(value))
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("client", ["SFT", "DPO", "GRPO"])
def test_the_losses_are_the_plain_ones(client: str, tmp_path: Path) -> None:
    if client != "SFT" and is_before("trl", "1.14"):
        pytest.skip("this TRL computes the loss outside of the model, which is refused: see the next test")
    arguments: dict[str, Any] = {"use_liger_kernel": True, "save_strategy": "no", "eval_strategy": "no", "max_steps": 2}
    plain = train(client, tmp_path / "plain", on_protrain=False, **arguments)
    ours = train(client, tmp_path / "ours", on_protrain=True, **arguments)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5, abs=1e-7)


def test_a_loss_outside_of_the_model_is_refused(tmp_path: Path) -> None:
    """As TRL had it before 1.14."""
    trainer = make("SFT", tmp_path, on_protrain=True)
    trainer.liger_loss_fn = type("Loss", (torch.nn.Module,), {"__module__": "liger_kernel.chunked_loss.dpo_loss"})()
    with pytest.raises(ValueError, match=r"use_liger_kernel=True: before 1\.14 TRL .* use TRL 1\.14 or newer"):
        trainer.train()
