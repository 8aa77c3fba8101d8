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


# TFLOP/s and GB/s by what the driver's name of the card has, as whole words in any order. The first row that fits
# counts, so special cards come first.
_CARDS: dict[str, tuple[float, float]] = {
    "H100 PCIe": (756, 2000),
    "H100 NVL": (835, 3900),
    "H100": (989, 3350),
    "GH200 144G": (989, 4900),
    "GH200": (989, 4000),
    "H200 NVL": (835, 4800),
    "H200": (989, 4800),
    "A100 40GB": (312, 1555),
    "A100 PCIE 80GB": (312, 1935),
    "A100": (312, 2039),
    "B200": (2250, 8000),
    "GB200": (2250, 8000),
    "MI300X": (1307, 5300),
    "L40S": (362, 864),
    "A10G": (70, 600),
    "RTX 5090": (209.5, 1792),
    "RTX 4090": (165.2, 1008),
    "RTX 3090 Ti": (80, 1008),
    "RTX 3090": (71, 936),
}
# Names of parts of a card (MIG slices, and virtual GPUs such as "A100-10C") and of slower cards.
_LESS = re.compile(r"\bMIG\b|-\d+[ABCQ]$|\bLAPTOP\b|\bMAX-Q\b|\bD\b")


def of_card(name: str) -> Datasheet | None:
    """The datasheet of the card that the driver calls ``name``, or None where it is not known.

    It is not that of a part of a card, or of a slower one, whose names have that of the whole or faster card in them.
    """
    for words, (matmul_tflops, memory_gbps) in _CARDS.items():
        if all(has_words(name, word) for word in words.split()) and not _LESS.search(name.upper()):
            return Datasheet(matmul_tflops=matmul_tflops, memory_gbps=memory_gbps)
    return None


def has_words(name: str, text: str) -> bool:
    """Whether ``text`` is in the name of a card as whole words. An RTX A1000 is no A100."""
    return re.search(rf"\b{re.escape(text)}\b", name, re.IGNORECASE) is not None
