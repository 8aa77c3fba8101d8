"""What makers promise: peak rates from datasheets, for comparison with measured rates.

Sources: NVIDIA's datasheets of H100 (SXM, PCIe), H200, GH200, B200, A100 (40 GB, 80 GB; SXM, PCIe) and L40S, its
whitepapers of GA102, Ada and RTX Blackwell, AWS's page of G5 instances for A10G, and AMD's datasheet of MI300X. Matmul
is dense bf16 with fp32 accumulation, without sparsity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Datasheet:
    """Peak rates of one card."""

    matmul_tflops: float
    memory_gbps: float


# Each text must be in the name that the driver gives, as whole words. The first row that fits counts, so special cards
# come first.
_CARDS: tuple[tuple[tuple[str, ...], Datasheet], ...] = (
    (("H100", "PCIe"), Datasheet(matmul_tflops=756, memory_gbps=2000)),
    (("H100", "NVL"), Datasheet(matmul_tflops=835, memory_gbps=3900)),
    (("H100",), Datasheet(matmul_tflops=989, memory_gbps=3350)),
    (("GH200", "144G"), Datasheet(matmul_tflops=989, memory_gbps=4900)),
    (("GH200",), Datasheet(matmul_tflops=989, memory_gbps=4000)),
    (("H200", "NVL"), Datasheet(matmul_tflops=835, memory_gbps=4800)),
    (("H200",), Datasheet(matmul_tflops=989, memory_gbps=4800)),
    (("A100", "40GB"), Datasheet(matmul_tflops=312, memory_gbps=1555)),
    (("A100", "PCIE", "80GB"), Datasheet(matmul_tflops=312, memory_gbps=1935)),
    (("A100",), Datasheet(matmul_tflops=312, memory_gbps=2039)),
    (("B200",), Datasheet(matmul_tflops=2250, memory_gbps=8000)),
    (("GB200",), Datasheet(matmul_tflops=2250, memory_gbps=8000)),
    (("MI300X",), Datasheet(matmul_tflops=1307, memory_gbps=5300)),
    (("L40S",), Datasheet(matmul_tflops=362, memory_gbps=864)),
    (("A10G",), Datasheet(matmul_tflops=70, memory_gbps=600)),
    (("RTX 5090",), Datasheet(matmul_tflops=209.5, memory_gbps=1792)),
    (("RTX 4090",), Datasheet(matmul_tflops=165.2, memory_gbps=1008)),
    (("RTX 3090 Ti",), Datasheet(matmul_tflops=80, memory_gbps=1008)),
    (("RTX 3090",), Datasheet(matmul_tflops=71, memory_gbps=936)),
)
# Names of parts of a card (MIG slices, and virtual GPUs such as "A100-10C") and of slower cards. The name of the whole
# or faster card is in them.
_LESS = re.compile(r"\bMIG\b|-\d+[ABCQ]$|\bLAPTOP\b|\bMAX-Q\b|\bD\b")


def is_less(name: str) -> bool:
    """Whether the driver calls a part of a card ``name``, or one that is slower than the card whose name is in it."""
    return _LESS.search(name.upper()) is not None


def of_card(name: str) -> Datasheet | None:
    """The datasheet of the card that the driver calls ``name``, or None where it is not known."""
    if is_less(name):
        return None
    return next((sheet for texts, sheet in _CARDS if all(has_words(name, text) for text in texts)), None)


def has_words(name: str, text: str) -> bool:
    """Whether ``text`` is in the name of a card as whole words. An RTX A1000 is no A100."""
    return re.search(rf"\b{re.escape(text)}\b", name, re.IGNORECASE) is not None
