"""A client that is told to mix bf16 and fp32 may mix them in its model, and computes losses as without ProTrain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protrain

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS, LENGTH, WIDTH, ROWS, STEPS = 50, 16, 32, 4, 4
CPU = "cpu"
MEMORY = {CPU: ("0.25MiB", "64MiB"), "cuda": ("256MiB", "2GiB")}  # on a CPU the first holds a part of the states


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer would copy the model to every GPU that the process sees."""
    visible = min(torch.cuda.device_count(), 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Words(nn.Module):
    """Its positions are a buffer in fp32, and its noise has torch's default type. Autocast takes them beside bf16."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.words(input_ids) + self.positions + 0.01 * torch.ones(LENGTH, WIDTH, device=input_ids.device)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"logits": logits} | ({} if labels is None else {"loss": weighted(logits, labels)})


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss with a weight for each word, as many write it."""
    weight = torch.linspace(0.5, 1.5, WORDS, dtype=logits.dtype, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)


def rows() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, WORDS, (STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def batches() -> list[Tensor]:
    return list(torch.stack([row["input_ids"] for row in rows()]).split(ROWS))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trainer(
    folder: Path, memory: str | None, device: str, *, own_loss: bool = False, bf16: bool = True
) -> list[Tensor]:
    transformers = pytest.importorskip("transformers")
    from protrain.integrations.transformers import ProTrainMixin

    losses: list[Tensor] = []

    base: Any = transformers.Trainer

    class Own(base):
        def _get_train_sampler(self, *_: Any) -> Any:  # early versions of transformers have no argument for it
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: nn.Module, inputs: Any, *others: Any, **more: Any) -> Tensor:
            outputs = model(**inputs)
            found: Tensor = weighted(outputs["logits"], inputs["labels"]) if own_loss else outputs["loss"]
            losses.append(found.detach())
            return found

    class Ours(ProTrainMixin, Own): ...

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        bf16=bf16,
        use_cpu=device == CPU,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    kind: Any = Own if memory is None else Ours
    ours: dict[str, Any] = {} if memory is None else {"protrain": {"device_memory": memory}}
    kind(model=Words(), args=arguments, train_dataset=rows(), **ours).train()
    return losses


def lightning_trainer(
    folder: Path, memory: str | None, device: str, *, precision: str = "bf16-mixed", empty: bool = False
) -> list[Tensor]:
    lightning = pytest.importorskip("lightning")
    from protrain.integrations.lightning import ProTrainStrategy

    losses: list[Tensor] = []
    base: Any = lightning.LightningModule

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            with protrain.empty_parameters() if empty else nullcontext():
                self.model = Words()

        def training_step(self, ids: Tensor, index: int) -> Tensor:
            loss = weighted(self.model(ids)["logits"], ids)
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return adamw(self)

    run = lightning.Trainer(
        accelerator=device,
        devices=1,
        strategy="auto" if memory is None else ProTrainStrategy(device_memory=memory, progress=False),
        precision=precision,
        gradient_clip_val=1.0,
        max_steps=STEPS,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    ids: Any = torch.cat(batches())
    run.fit(Module(), torch.utils.data.DataLoader(ids, batch_size=ROWS))
    return losses[-STEPS:]  # a plan is made by more


def accelerated(folder: Path, memory: str | None, device: str) -> list[Tensor]:
    accelerate = pytest.importorskip("accelerate")
    from protrain.integrations.accelerate import wrap

    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=device == CPU, mixed_precision="bf16")
    model: Any = Words()
    optimizer: Any = adamw(model)
    if memory is not None:
        model, optimizer = wrap(accelerator, model, optimizer, device_memory=memory, progress=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for ids in (batch.to(device) for batch in batches()):
        loss = weighted(model(ids)["logits"], ids)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


CLIENTS: dict[str, Callable[..., list[Tensor]]] = {
    "Trainer": trainer,
    "Trainer with a loss of its own": lambda *args: trainer(*args, own_loss=True),
    "Lightning": lightning_trainer,
    "Lightning, bf16-true": lambda *args: lightning_trainer(*args, precision="bf16-true"),
    "Accelerate": accelerated,
}


@pytest.mark.parametrize("device", [CPU, pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("client", CLIENTS)
def test_losses_are_those_of_the_client_alone(client: str, device: str, tmp_path: Path) -> None:
    """Their type, their values but for how bf16 weights round, and the same bits under each plan."""
    plain, tight, ample = (CLIENTS[client](tmp_path, memory, device) for memory in (None, *MEMORY[device]))
    assert len(plain) == len(tight) == STEPS
    assert tight == ample
    assert [loss.dtype for loss in tight] == [loss.dtype for loss in plain]
    assert float(tight[0]) == pytest.approx(float(plain[0]), rel=5e-4)
    assert [float(loss) for loss in tight] == pytest.approx([float(loss) for loss in plain], rel=1e-2)
    assert float(plain[-1]) < float(plain[0]) - 0.3


def test_lightning_converts_a_model_without_data(tmp_path: Path) -> None:
    tight, ample = (lightning_trainer(tmp_path, m, CPU, precision="bf16-true", empty=True) for m in MEMORY[CPU])
    assert tight == ample
    assert {loss.dtype for loss in tight} == {torch.bfloat16}
    assert float(tight[-1]) < float(tight[0]) - 0.3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_trainer_follows_accelerate_launch(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells the precision of its configuration by a variable, and the Trainer's own arguments say nothing."""
    memory, _ = MEMORY[CPU]
    expected = trainer(tmp_path, memory, CPU)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    pytest.importorskip("accelerate").state.AcceleratorState._reset_state(True)
    if precision == "bf16":
        assert trainer(tmp_path, memory, CPU, bf16=False) == expected
    else:
        with pytest.raises(ValueError, match=r"mixed precision fp16 of accelerate launch cannot be used.*use bf16"):
            trainer(tmp_path, memory, CPU, bf16=False)


def test_accelerate_of_another_precision_is_refused() -> None:
    pytest.importorskip("accelerate")
    from protrain.integrations.accelerate import wrap

    accelerator: Any = SimpleNamespace(mixed_precision="fp16")  # one of Accelerate has it on GPUs alone
    model = Words()
    with pytest.raises(ValueError, match=r'mixed_precision="fp16" cannot be used.*use bf16'):
        wrap(accelerator, model, adamw(model))
