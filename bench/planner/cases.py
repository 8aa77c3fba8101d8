"""Models, batches and limits to predict: shapes of published models at depths that one GPU and its host can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from protrain.records import Record


@dataclass(frozen=True, kw_only=True)
class Case(Record):
    """One training to be planned and measured."""

    shape: str  # of protrain.cli.shapes
    layers: int
    batch: int
    sequence: int
    n_plans: int = 4  # drawn at random
    held_out: bool = False  # its points were not looked at while the models were tuned
    compile: bool = False
    clip: bool = True  # False: updates inside backward
    device_memory: str | None = None  # None: all there is
    host_memory: str | None = None

    @property
    def name(self) -> str:
        """Unique among cases."""
        marks = ("-compiled" if self.compile else "") + ("" if self.clip else "-inside")
        limit = f"-{self.device_memory}" if self.device_memory else ""
        return f"{self.shape}-{self.layers}x{self.batch}x{self.sequence}{marks}{limit}"

    def with_host_memory(self, host_memory: str) -> Case:
        """The same on a host that is told how much it has."""
        return replace(self, host_memory=host_memory)


def _held(shape: str, layers: int, batch: int, sequence: int, n_plans: int = 4, **options: bool) -> Case:
    return Case(shape=shape, layers=layers, batch=batch, sequence=sequence, n_plans=n_plans, held_out=True, **options)


def _tuned(shape: str, layers: int, batch: int, sequence: int, n_plans: int = 4, **options: bool) -> Case:
    return Case(shape=shape, layers=layers, batch=batch, sequence=sequence, n_plans=n_plans, **options)


CASES = (
    _tuned("llama-7b", 8, 4, 2048),
    _tuned("gpt2-10b", 8, 8, 1024),
    _tuned("opt-13b", 6, 4, 2048, clip=False),
    _tuned("mistral-7b", 10, 2, 4096, compile=True),
    _tuned("llama2-13b", 8, 8, 2048),
    _tuned("gpt2-10b", 48, 8, 1024, 2),
    _held("gpt2-15b", 4, 4, 1024),
    _held("llama-7b", 16, 8, 2048),
    _held("opt-13b", 8, 16, 1024),
    _held("mistral-7b", 12, 1, 8192, clip=False),
    _held("gpt2-10b", 16, 16, 1024, compile=True),
    _held("llama-7b", 32, 8, 2048, 2),
    _held("opt-13b", 40, 4, 2048, 2),
    _held("llama2-13b", 40, 4, 1024, 2),
)
SMOKE = (Case(shape="tiny", layers=4, batch=2, sequence=64, n_plans=2, device_memory="64MiB"),)
