"""Model states for the AdamW benchmarks, plain torch steps on them, and the check against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.peers import close, same_bits
from bench.kernels.recorder import Recorder
from bench.kernels.rows import OURS
from protrain.common.tables import format_bytes
from protrain.engine.states.arena import Arena
from protrain.hardware.memory import available_host_bytes
from protrain_kernels import adam_reference, adam_scalars, split

LR, BETA1, BETA2, EPS, WEIGHT_DECAY, STEP = 1e-4, 0.9, 0.95, 1e-8, 0.1, 10
SCALARS = adam_scalars(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY, step=STEP, decoupled=True)
BYTES = {torch.bfloat16: 26, torch.float16: 28, torch.float32: 28}  # read and written a parameter
NARROW_BYTES = 8  # that moments in bf16 save of them
FLOPS = 15  # a parameter, square root and quotient counted as one each
_SLICE = 1 << 20  # elements that are compared at the start, in the middle and at the end
_HOST_SHARE = 0.8  # of the free host memory; a step of plain torch needs some beside the states


class States(NamedTuple):
    """One chunk's weight, fp32 master in the weight's form, moments and gradient, 1-d on one device."""

    weight: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor

    @classmethod
    def random(
        cls,
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        split_master: bool,
        moment_dtype: torch.dtype = torch.float32,
    ) -> States:
        """Values as in training. Without ``split_master`` a 16-bit weight has an fp32 master."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(scale: float) -> Tensor:
            return torch.randn(elements, generator=generator, device=device).mul_(scale)

        master: Tensor | None = normal(0.02)
        assert master is not None
        if dtype == torch.bfloat16 and split_master:
            weight, master = split(master)
        elif dtype == torch.float32:
            weight, master = master, None
        else:
            weight = master.to(dtype)
        moments = normal(1e-4).to(moment_dtype), normal(1e-4).square_().to(moment_dtype)
        return cls(weight, master, *moments, normal(1e-3).to(dtype))

    def part(self, place: slice) -> States:
        """Copies of a part, the gradient where the weight is."""
        return self._each(lambda tensor: tensor[place].to(self.weight.device, copy=True))

    def to(self, device: torch.device) -> States:
        """Copies on ``device``."""
        return self._each(lambda tensor: tensor.to(device, copy=True))

    def on_host(self, arena: Arena) -> States:
        """Copies in memory of ``arena``. MemoryError where the host has too little for them."""
        _need_host_bytes(sum(tensor.nbytes for tensor in self if tensor is not None))
        return self._each(lambda tensor: arena.take(tensor.numel(), tensor.dtype).copy_(tensor))

    def _each(self, change: Callable[[Tensor], Tensor]) -> States:
        master = None if self.master is None else change(self.master)
        return States(change(self.weight), master, change(self.exp_avg), change(self.exp_avg_sq), change(self.grad))

    def places(self) -> list[slice]:
        """Parts that a check compares: all of a small chunk, samples of a large one."""
        elements = self.weight.numel()
        if elements <= 3 * _SLICE:
            return [slice(0, elements)]
        middle = elements // 2 // 128 * 128
        return [slice(0, _SLICE), slice(middle, middle + _SLICE), slice(elements - _SLICE, elements)]


def measure(
    recorder: Recorder,
    states: States,
    run: Callable[[], object],
    *,
    implementation: str,
    bytes_each: int = BYTES[torch.bfloat16],
    writes_weight: bool = True,
    after: Callable[[], object] = lambda: None,
    **row: Any,
) -> None:
    """A row of one step of AdamW on ``states``, which ours does bit for bit.

    Args:
        recorder: that keeps the row.
        states: that ``run`` updates.
        run: one step. What has a method ``start`` is started before the first.
        implementation: who does it.
        bytes_each: that move for each parameter.
        writes_weight: whether the step writes the 16-bit weight as well.
        after: called after the step that is checked.
        row: what else ``Recorder.measure`` takes.
    """
    elements = states.weight.numel()

    def check() -> str:
        getattr(run, "start", lambda: None)()
        before = [states.part(place) for place in states.places()]
        run()
        after()
        if implementation == OURS:
            return expect_bits(states, before)
        return expect_close(states, before, weight=writes_weight)

    recorder.measure(
        implementation=implementation,
        bytes_moved=bytes_each * elements,
        flops=FLOPS * elements,
        run=run,
        check=check,
        **row,
    )


def expect_bits(states: States, before: list[States]) -> str:
    """The verdict once ``states``, whose parts were ``before``, took a step of ours."""
    for place, part in zip(states.places(), before, strict=True):
        adam_reference(*part, SCALARS)
        after = states.part(place)
        for name in ("weight", "master", "exp_avg", "exp_avg_sq"):
            wanted = getattr(part, name)
            if wanted is not None:
                same_bits(name, getattr(after, name), wanted)
    return "bits equal"


def expect_close(states: States, before: list[States], *, weight: bool = True) -> str:
    """The verdict once ``states``, with an fp32 master, took another implementation's step.

    ``weight`` says whether that writes the 16-bit weight as well.
    """
    worst = 0.0
    for place, part in zip(states.places(), before, strict=True):
        after = states.part(place)
        assert part.master is not None
        assert after.master is not None
        adam_reference(part.master, None, part.exp_avg, part.exp_avg_sq, part.grad.float(), SCALARS)
        worst = max(worst, close("master", after.master, part.master, 1e-6))
        close("exp_avg", after.exp_avg, part.exp_avg, 1e-5)
        close("exp_avg_sq", after.exp_avg_sq, part.exp_avg_sq, 1e-5)
        if weight:
            close("weight", after.weight, part.master, 2.0**-8)
    return f"master within {worst:.0e}"


def plain_step(weight: Tensor, master: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor) -> None:
    """AdamW as one writes it in torch: 16-bit weight and gradient, fp32 master."""
    assert master is not None
    g = grad.float()
    master.mul_(SCALARS.decay)
    exp_avg.mul_(BETA1).add_(g, alpha=1 - BETA1)
    exp_avg_sq.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
    denominator = exp_avg_sq.sqrt().mul_(SCALARS.inv_sqrt_bias_correction2).add_(EPS)
    master.addcdiv_(exp_avg, denominator, value=-SCALARS.step_size)
    weight.copy_(master)


class OptimizerStep:
    """A step of a torch optimizer on the fp32 master, with the casts that 16-bit training puts around it.

    Args:
        states: with an fp32 master.
        make: ``make(parameters, **hyperparameters, **options)`` builds the optimizer.
        grad: [n] float32, where the gradient is cast to; made when None.
        casts: False leaves the 16-bit tensors out.
        options: of the optimizer.
    """

    def __init__(
        self,
        states: States,
        make: Callable[..., torch.optim.Optimizer],
        *,
        grad: Tensor | None = None,
        casts: bool = True,
        **options: object,
    ) -> None:
        assert states.master is not None
        self._states, self._casts = states, casts
        self._grad = torch.empty_like(states.master) if grad is None else grad
        self._grad.copy_(states.grad)
        self._parameter = torch.nn.Parameter(states.master)
        self._parameter.grad = self._grad
        hyperparameters = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": WEIGHT_DECAY}
        self._optimizer = make([self._parameter], **hyperparameters, **options)

    def start(self) -> None:
        """Let the optimizer make its own states, then give it ours in their place, at the step before STEP."""
        kept = self._parameter.data.clone()
        self._optimizer.step()
        self._parameter.data.copy_(kept)
        own = self._optimizer.state[self._parameter]
        own["exp_avg"], own["exp_avg_sq"] = self._states.exp_avg, self._states.exp_avg_sq
        for place in (own, self._optimizer.param_groups[0]):  # DeepSpeed counts for the group as well
            if "step" in place:
                place["step"] = torch.full_like(place["step"], STEP - 1) if torch.is_tensor(place["step"]) else STEP - 1

    def __call__(self) -> None:
        if self._casts:
            self._grad.copy_(self._states.grad)
        self._optimizer.step()
        if self._casts:
            assert self._states.master is not None
            self._states.weight.copy_(self._states.master)


def _need_host_bytes(needed_bytes: int) -> None:
    """MemoryError unless ``needed_bytes`` of host memory are free. The system would end the process, not raise it."""
    free_bytes = available_host_bytes()
    if needed_bytes > _HOST_SHARE * free_bytes:
        raise MemoryError(f"{format_bytes(needed_bytes)} of host memory, of which {format_bytes(free_bytes)} are free")
