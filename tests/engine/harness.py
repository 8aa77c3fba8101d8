"""Plans made by hand, one training loop for plain and wrapped models, and the comparison of their results."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import protrain
from protrain.common.batch import arguments
from protrain.common.parameters import DTYPES
from protrain.hardware.detection import detect
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import BlockMode, MemoryModel, Plan, check, choose_chunk_elements, evaluate, pack
from protrain.planning.plan import layout_of
from protrain.profiler.model_profile import ModelProfile
from protrain_kernels import padded
from tests.engine.plain_loop import PlainOptimizer, prepare_plain
from tests.engine.profiles import shared_profile

_MODES = {"n": BlockMode.NONE, "c": BlockMode.CKPT, "s": BlockMode.SWAP, "i": BlockMode.CKPT_SWAP}  # i: inputs
Batch: TypeAlias = Any
Trainer: TypeAlias = ProTrainOptimizer | PlainOptimizer
MakeModel: TypeAlias = Callable[[], nn.Module]
MakeOptimizer: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]
LossOf: TypeAlias = Callable[[nn.Module, Batch], Tensor]
Run: TypeAlias = Callable[[nn.Module, Any, Sequence[Batch]], Any]  # what a script does with model and optimizer
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Spec:
    """A plan in relative terms, for a model with any number of chunks and blocks."""

    persist: str  # "all", "some" or "none" of the chunks
    buffers: str  # "least", "middle" or "all"
    modes: str  # a letter for each block, repeated over the blocks
    small: bool = False  # chunks as small as the largest parameter allows, so that a unit spreads over several
    speculate: bool = False  # speculative updates
    weights: bool = False  # they compute weights only
    whole: bool = False  # except for half of them, rounded down
    stream: bool = False  # the device may update chunks in host memory, of which half have speculative updates at most
    attention: bool = False  # kept by recomputed blocks
    packed: bool = False  # what swapped blocks save goes to host memory in one buffer
    sums: bool = False  # in steps of several batches the device sums half of the chunks in host memory, rounded up

    def __str__(self) -> str:
        names = ("small", "speculate", "weights", "whole", "stream", "attention", "packed", "sums")
        chosen = {name: getattr(self, name) for name in names}
        marks = "".join(f"-{name}" for name, is_so in chosen.items() if is_so)
        return f"{self.persist}-{self.buffers}-{self.modes}{marks}"


PLANS = (
    Spec("all", "least", "n"),
    Spec("all", "least", "c"),
    Spec("all", "least", "s"),
    Spec("all", "least", "nsc"),
    Spec("some", "least", "n"),
    Spec("some", "middle", "c", speculate=True, attention=True, sums=True),
    Spec("some", "all", "scn", small=True),
    Spec("some", "least", "s", small=True, packed=True),
    Spec("none", "least", "n"),
    Spec("none", "least", "c"),
    Spec("none", "least", "s", speculate=True, packed=True),
    Spec("none", "least", "cns", small=True, speculate=True),
    Spec("none", "middle", "ssn", small=True),
    Spec("none", "all", "cn", sums=True),
    Spec("all", "least", "i"),
    Spec("some", "least", "isin", speculate=True),
    Spec("none", "least", "i", small=True, attention=True),
    Spec("none", "middle", "cn", speculate=True, weights=True),
    Spec("some", "least", "cs", small=True, speculate=True, weights=True, whole=True),
    Spec("none", "middle", "c", stream=True),
    Spec("some", "least", "cn", small=True, speculate=True, stream=True),
)
# Every mechanism of a plan once, for what is about none of them. Either half has recomputed and resident blocks.
FEW_PLANS = (
    Spec("none", "least", "nc", small=True, speculate=True, weights=True, sums=True),
    Spec("none", "least", "cn", speculate=True, stream=True),
    Spec("some", "least", "isn", small=True, attention=True),
    Spec("all", "least", "sc", packed=True),
)


def make_plan(spec: Spec, profile: ModelProfile, device: torch.device, *, world_size: int = 1) -> Plan:
    """The plan that ``spec`` means for the model of ``profile``."""
    hardware = detect(device, device_memory="4GiB", host_memory="4GiB")
    hardware = dataclasses.replace(hardware, world_size=world_size)
    largest = max(padded(parameter.numel) for parameter in profile.parameters)
    chunk_elements = largest if spec.small else choose_chunk_elements(profile)
    layout = pack(profile, chunk_elements, world_size)
    n_chunks = len(layout.chunks)
    n_persist = {"all": n_chunks, "some": -(-n_chunks // 3), "none": 0}[spec.persist]
    memory, away = MemoryModel(profile, hardware, layout), n_chunks - n_persist
    least, most = memory.least_buffers[n_persist], memory.all_buffers[n_persist]
    modes = tuple(_MODES[spec.modes[index % len(spec.modes)]] for index in range(len(profile.blocks)))
    n_speculate = (away // 2 if spec.stream else away) if spec.speculate and not profile.step_during_backward else 0
    n_weight_only = (n_speculate - n_speculate // 2 if spec.whole else n_speculate) if spec.weights else 0
    plan = evaluate(
        profile,
        hardware,
        n_persist=n_persist,
        n_buffer={"least": least, "middle": (least + most) // 2, "all": most}[spec.buffers],
        n_swap=modes.count(BlockMode.SWAP),
        n_ckpt=modes.count(BlockMode.CKPT) + modes.count(BlockMode.CKPT_SWAP),
        n_ckpt_swap=modes.count(BlockMode.CKPT_SWAP),
        n_speculate=n_speculate,
        n_weight_only=n_weight_only,
        n_device_sum=-(-away // 2) if spec.sums and profile.accumulation > 1 else 0,
        stream=spec.stream,
        keep_attention=spec.attention,
        chunk_elements=chunk_elements,
    )
    plan = dataclasses.replace(plan, block_modes=modes, pack_swaps=(spec.packed,) * len(modes))
    return check(plan, profile, hardware)


def least_host_bytes(plan: Plan, profile: ModelProfile, device: torch.device) -> int:
    """Host memory with which ``plan``, with updates inside backward, has the fewest shared gradient buffers."""
    memory = MemoryModel(profile, detect(device), layout_of(profile, plan))
    return memory.least_host_bytes(plan.n_persist, memory.activations(plan.block_modes).swapped_bytes)


def wrap_under(
    spec: Spec,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    tight: bool = False,
    tight_host: bool = False,
    world_size: int = 1,
    late: bool = False,
    **options: Any,
) -> tuple[nn.Module, ProTrainOptimizer]:
    """``protrain.wrap`` under ``spec``, on every one of ``world_size`` ranks.

    If it is ``late``, wrap gets no example batch, and the first call of the model begins the training. ``tight`` leaves
    no device memory beyond what the plan takes. ``tight_host`` leaves no more host memory either, or as little as
    updates inside backward can do with, and so does a plan for several batches a step.
    """
    profile = shared_profile(model, batch, optimizer=optimizer, device=device, dtype=dtype)
    training = ("accumulation", "moment_dtype", "step_during_backward")
    profile = dataclasses.replace(profile, **{name: options[name] for name in training if name in options})
    plan = make_plan(spec, profile, device, world_size=world_size)
    host_memory: int | str = "4GiB"
    if tight_host and profile.step_during_backward:
        host_memory = least_host_bytes(plan, profile, device)
    elif tight_host or profile.accumulation > 1:
        host_memory = plan.host_bytes * world_size  # which share it
    return protrain.wrap(
        model,
        optimizer,
        example_batch=None if late else batch,
        device=device,
        dtype=dtype,
        plan=plan,
        device_memory=plan.device_bytes if tight else "4GiB",
        host_memory=host_memory,
        progress=False,
        **options,
    )


@dataclass(frozen=True)
class Loop:
    """What a training does in a step; the same for the plain and the wrapped model."""

    max_norm: float | None = None
    accumulate: int = 1
    no_sync: bool = False
    scheduler: bool = True
    loss: LossOf = field(default=lambda model, batch: default_loss(model, batch))

    def run(self, model: nn.Module, optimizer: Trainer, batches: Sequence[Batch], *, seed: int = 1) -> list[float]:
        """Train on ``batches`` in turn, ``accumulate`` of them a step. Returns every loss and norm, NaN as -1."""
        torch.manual_seed(seed)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30) if self.scheduler else None
        values = []
        for first in range(0, len(batches), self.accumulate):
            part = batches[first : first + self.accumulate]
            for index, batch in enumerate(part):
                no_sync: Any = model.no_sync if self.no_sync and index + 1 < len(part) else nullcontext
                with no_sync():
                    loss = self.loss(model, batch)
                    optimizer.backward(loss)
                values.append(loss.detach())
                del loss
            if self.max_norm is not None:
                values.append(optimizer.clip_grad_norm_(self.max_norm))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        return [-1.0 if value.isnan() else float(value) for value in values]


def default_loss(model: nn.Module, batch: Batch) -> Tensor:
    """``.loss`` of the output, or a plain function of it."""
    args, kwargs = arguments(batch)
    output = model(*args, **kwargs)
    loss = getattr(output, "loss", output)
    assert isinstance(loss, Tensor)
    return loss if loss.ndim == 0 else loss.float().square().mean()


def adamw(model: nn.Module, learning_rate: float = 3e-3) -> torch.optim.Optimizer:
    """AdamW in the usual two groups: matrices decay, vectors do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0, "lr": 1e-3},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=(0.9, 0.95))


def states(model: nn.Module, optimizer: Trainer) -> dict[str, Tensor]:
    """Every weight, buffer, master and optimizer state, on the CPU."""
    found = {f"model.{name}": value.detach().cpu().clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for kind, value in optimizer.export_parameter(name).items():
                found[f"{kind}.{name}"] = value.clone()
    found["skipped steps"] = torch.tensor(optimizer.skipped_steps)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], *, where: str = "") -> None:
    """Same names, dtypes and bits; ``where`` is told if not."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        ours = found[name]
        assert ours.dtype == value.dtype, name
        assert ours.shape == value.shape, name
        same = ours.contiguous().view(-1).view(torch.uint8).equal(value.contiguous().view(-1).view(torch.uint8))
        assert same, f"{where} {name} differs, by at most {(ours.double() - value.double()).abs().max()}"


def check_equal_to_plain(
    make: MakeModel,
    batches: Sequence[Batch],
    *,
    run: Run = Loop().run,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    optimizer: MakeOptimizer = adamw,
    specs: Sequence[Spec] = FEW_PLANS,
    make_plain: MakeModel | None = None,
    **options: Any,
) -> list[ProTrainOptimizer]:
    """What ``run`` finds and leaves under every one of ``specs`` has the plain loop's bits. Returns the optimizers.

    Random numbers that ``make`` draws are the same each time. ``make_plain`` makes the model of the plain loop where it
    differs; ``options`` are those of ``wrap_under``.
    """
    moments = DTYPES[options.get("moment_dtype", "float32")]
    how: dict[str, Any] = {"device": device, "dtype": dtype, "optimizer": optimizer, "moment_dtype": moments}
    expected, final = plain_run(make_plain or make, batches, run=run, **how)
    trained = []
    for spec in specs:
        with seeded():
            model = make()
        wrapped, trainer = wrap_under(spec, model, optimizer(model), batches[0], device=device, dtype=dtype, **options)
        torch.manual_seed(1)
        assert run(wrapped, trainer, batches) == expected, str(spec)
        assert_same(states(wrapped, trainer), final, where=str(spec))
        trained.append(trainer)
    return trained


def plain_run(
    make: MakeModel,
    batches: Sequence[Batch],
    *,
    run: Run = Loop().run,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    optimizer: MakeOptimizer = adamw,
    moment_dtype: torch.dtype = torch.float32,
) -> tuple[Any, dict[str, Tensor]]:
    """What ``run`` finds and leaves in the plain loop."""
    with seeded():
        model = make()
    plain, trainer = prepare_plain(model, optimizer(model), device=device, dtype=dtype, moment_dtype=moment_dtype)
    torch.manual_seed(1)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    found = run(plain, trainer, batches)
    after = plain.state_dict()
    assert any(not value.equal(after[name]) for name, value in before.items()), "the plain loop does not train"
    return found, states(plain, trainer)


@contextmanager
def unharmed(
    spec: Spec, make: MakeModel, batches: Sequence[Batch], *, steps: int = 0, **options: Any
) -> Iterator[tuple[Any, ProTrainOptimizer]]:
    """A model wrapped under ``spec`` that has made ``steps`` steps. What happens to it inside has left it as it was.

    Then it goes on to the bits of the plain loop.
    """
    with seeded():
        model = make()
    trained = wrap_under(spec, model, adamw(model), batches[0], **options)
    Loop().run(*trained, batches[:steps])
    yield trained

    def run(model: nn.Module, trainer: Any, data: Sequence[Batch]) -> list[float]:
        Loop().run(model, trainer, data[:steps])
        return Loop().run(model, trainer, data[steps:])

    how = {name: value for name, value in options.items() if name in ("device", "dtype")}
    expected, final = plain_run(make, batches, run=run, **how)
    assert Loop().run(*trained, batches[steps:]) == expected
    assert_same(states(*trained), final)


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """The same random numbers inside, whatever came before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Calls:
    """Counts the calls of functions in ``folder`` of the package, made on this thread inside, and interrupts one."""

    def __init__(self, at: int = 0, *, folder: str = "") -> None:
        self.made, self.at = 0, at
        self._prefix = os.path.join(os.path.dirname(protrain.__file__), folder)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(self._prefix):
            self.made += 1
            if self.made == self.at:
                raise KeyboardInterrupt

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)


def generate_no_code(monkeypatch: Any) -> None:
    """Blocks are traced and split as ever, but no code is generated, which needs a C++ compiler and takes long."""
    import torch._inductor.compile_fx
    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", aot_eager)
