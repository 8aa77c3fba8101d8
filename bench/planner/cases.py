"""Models, batches and limits to predict: shapes of published models at depths that one GPU and its host can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from protrain.common.records import Record


@dataclass(frozen=True, kw_only=True)
class Case(Record):
    """One training to be planned and measured."""

    shape: str  # of protrain.cli.shapes
    layers: int
    batch: int
    sequence: int
    accumulation: int = 1  # micro-batches in a step
    n_plans: int = 4  # the number of plans drawn at random
    held_out: bool = False  # whether the models were tuned without its points
    compile: bool = False
    clip: bool = True  # False: updates inside backward
    device_memory: str | None = None  # the limit; None: all there is
    host_memory: str | None = None

    @property
    def name(self) -> str:
        """Unique among cases."""
        marks = ("-compiled" if self.compile else "") + ("" if self.clip else "-inside")
        limit = f"-{self.device_memory}" if self.device_memory else ""
        batches = f"x{self.accumulation}" if self.accumulation > 1 else ""
        return f"{self.shape}-{self.layers}x{self.batch}x{self.sequence}{batches}{marks}{limit}"

    def with_host_memory(self, host_memory: str) -> Case:
        """This case with a limit of host memory."""
        return replace(self, host_memory=host_memory)


def _tuned(shape: str, layers: int, batch: int, sequence: int, n_plans: int = 4) -> Case:
    return Case(shape=shape, layers=layers, batch=batch, sequence=sequence, n_plans=n_plans)


def _held(shape: str, layers: int, batch: int, sequence: int, n_plans: int = 4) -> Case:
    return replace(_tuned(shape, layers, batch, sequence, n_plans), held_out=True)


CASES = (
    _tuned("llama-7b", 8, 4, 2048),
    _tuned("gpt2-10b", 8, 8, 1024),
    replace(_tuned("opt-13b", 6, 4, 2048), clip=False),
    replace(_tuned("mistral-7b", 10, 2, 4096), compile=True),
    _tuned("llama2-13b", 8, 8, 2048),
    _held("gpt2-15b", 4, 4, 1024),
    _held("llama-7b", 16, 8, 2048),
    _held("opt-13b", 8, 16, 1024),
    replace(_held("mistral-7b", 12, 1, 8192), clip=False),
    replace(_held("gpt2-10b", 16, 16, 1024), compile=True),
    _held("llama3-8b", 8, 4, 2048),  # whose embedding and head are larger than a block
    # whole models come last: each takes a minute to place 100 GiB
    _held("llama-7b", 32, 8, 2048, 2),
    _tuned("gpt2-10b", 48, 8, 1024, 2),
    _held("opt-13b", 40, 4, 2048, 2),
    _held("llama2-13b", 40, 4, 1024, 2),
)
_LLAMA = Case(shape="llama-7b", layers=10, batch=2, sequence=2048, n_plans=1, held_out=True)
_MISTRAL = Case(shape="mistral-7b", layers=8, batch=1, sequence=4096, n_plans=1, held_out=True, compile=True)
_GPT2 = Case(shape="gpt2-10b", layers=8, batch=4, sequence=1024, n_plans=1, held_out=True)
# Steps of several micro-batches, of 4,096 tokens each. On an H200 the chosen plans keep few chunks on the device, about
# half of them, and all.
ACCUMULATED = (
    replace(_LLAMA, accumulation=2, n_plans=2, device_memory="12GiB"),
    replace(_MISTRAL, accumulation=2, n_plans=2, device_memory="20GiB"),
    replace(_GPT2, accumulation=2, n_plans=2),
    replace(_MISTRAL, accumulation=8, device_memory="12GiB"),
    replace(_GPT2, accumulation=8, device_memory="26GiB"),
    replace(_LLAMA, accumulation=8),
    replace(_GPT2, accumulation=32, device_memory="16GiB"),
    replace(_LLAMA, accumulation=32, device_memory="36GiB"),
    replace(_MISTRAL, accumulation=32),
)
# Small models under limits from tight to roomy, of which many can be measured in a short time.
REGRET = (
    Case(shape="llama-7b", layers=4, batch=4, sequence=2048, n_plans=20, device_memory="12GiB"),
    Case(shape="llama-7b", layers=6, batch=2, sequence=4096, n_plans=20, device_memory="24GiB"),
    Case(shape="gpt2-10b", layers=6, batch=8, sequence=1024, n_plans=20, device_memory="16GiB"),
    Case(shape="gpt2-10b", layers=4, batch=16, sequence=1024, n_plans=20, device_memory="20GiB", compile=True),
    Case(shape="opt-13b", layers=4, batch=4, sequence=1024, n_plans=20, device_memory="14GiB", clip=False),
    Case(shape="mistral-7b", layers=6, batch=1, sequence=8192, n_plans=20, device_memory="16GiB"),
)
SMOKE = (Case(shape="tiny", layers=4, batch=2, sequence=64, n_plans=2, device_memory="64MiB"),)
