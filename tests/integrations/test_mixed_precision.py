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
from protrain.integrations.accelerate import wrap
from tests.integrations.clients import forget_precision, make
from tests.integrations.lightning_runs import WIDTH, LightningModule, make_trainer, protrain_strategy
from tests.tiny_models import VOCABULARY

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH, ROWS, STEPS = 16, 4, 4
CPU = "cpu"
MEMORY = {CPU: ("0.3MiB", "64MiB"), "cuda": ("256MiB", "2GiB")}  # on a CPU the first holds a part of the states


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
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        positions = self.positions[: input_ids.shape[1]]
        x = self.words(input_ids) + positions + 0.01 * torch.ones(positions.shape, device=input_ids.device)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"logits": logits} | ({} if labels is None else {"loss": weighted(logits, labels)})


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss with a weight for each word, as many write it."""
    weight = torch.linspace(0.5, 1.5, VOCABULARY, dtype=logits.dtype, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)


def batches() -> list[Tensor]:
    ids = torch.randint(0, VOCABULARY, (STEPS * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return list(ids.split(ROWS))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trainer(
    folder: Path, memory: str | None, device: str, *, own_loss: bool = False, bf16: bool = True
) -> list[Tensor]:
    losses: list[Tensor] = []
    settings: dict[str, Any] = {"bf16": bf16, "use_cpu": device == CPU, "per_device_train_batch_size": ROWS}
    unsaved: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "no"}
    made = make("Trainer", folder, on_protrain=memory is not None, memory=memory, model=Words, **settings, **unsaved)

    def compute_loss(self: Any, model: nn.Module, inputs: Any, *others: Any, **more: Any) -> Tensor:
        outputs = model(**inputs)
        found: Tensor = weighted(outputs["logits"], inputs["labels"]) if own_loss else outputs["loss"]
        losses.append(found.detach())
        return found

    made.__class__ = type("Own", (type(made),), {"compute_loss": compute_loss})
    made.train()
    return losses


def lightning_trainer(
    folder: Path, memory: str | None, device: str, *, precision: str = "bf16-mixed", empty: bool = False
) -> list[Tensor]:
    losses: list[Tensor] = []

    class Module(LightningModule):
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

    strategy = "auto" if memory is None else protrain_strategy(memory)
    settings = {"accelerator": device, "precision": precision, "gradient_clip_val": 1.0, "max_steps": STEPS}
    run = make_trainer(folder, strategy, limit_val_batches=0, val_check_interval=None, **settings)
    ids: Any = torch.cat(batches())
    run.fit(Module(), torch.utils.data.DataLoader(ids, batch_size=ROWS))
    return losses[-STEPS:]  # a plan is made by more


def accelerated(folder: Path, memory: str | None, device: str) -> list[Tensor]:
    forget_precision()
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
    if precision == "bf16":
        assert trainer(tmp_path, memory, CPU, bf16=False) == expected
    else:
        with pytest.raises(ValueError, match=r"mixed precision fp16 of accelerate launch cannot be used.*use bf16"):
            trainer(tmp_path, memory, CPU, bf16=False)


def test_accelerate_of_another_precision_is_refused() -> None:
    accelerator: Any = SimpleNamespace(mixed_precision="fp16")  # one of Accelerate has it on GPUs alone
    model = Words()
    with pytest.raises(ValueError, match=r'mixed_precision="fp16" cannot be used.*use bf16'):
        wrap(accelerator, model, adamw(model))
