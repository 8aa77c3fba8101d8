"""Kernels for training with offloaded optimizer states, usable alone: Triton on GPUs, C on host memory.

Triton, C and the plain torch references give the same bits, but for ``linear_cross_entropy``. Importing the package
needs no GPU. The C source is compiled at its first use.
"""

from protrain_kernels.adam import adam, adam_reference
from protrain_kernels.adam_types import MASTER_DTYPES, AdamScalars, AdamStates, adam_scalars
from protrain_kernels.checks import PADDING, TILE, padded, tiles
from protrain_kernels.flatten import flatten, unflatten
from protrain_kernels.flatten_kernels import flatten_reference, unflatten_reference
from protrain_kernels.fold import fold, fold_reference
from protrain_kernels.from_host import from_host
from protrain_kernels.linear_cross_entropy import linear_cross_entropy
from protrain_kernels.pack import Packed, PackedView, pack, unpack
from protrain_kernels.rounding import sum_of_squares_reference
from protrain_kernels.slices import Slice, in_parts
from protrain_kernels.split_master import join, split
from protrain_kernels.streamed_adam import AdamStaging, streamed_adam

__all__ = [
    "MASTER_DTYPES",
    "PADDING",
    "TILE",
    "AdamScalars",
    "AdamStaging",
    "AdamStates",
    "Packed",
    "PackedView",
    "Slice",
    "adam",
    "adam_reference",
    "adam_scalars",
    "flatten",
    "flatten_reference",
    "fold",
    "fold_reference",
    "from_host",
    "in_parts",
    "join",
    "linear_cross_entropy",
    "pack",
    "padded",
    "split",
    "streamed_adam",
    "sum_of_squares_reference",
    "tiles",
    "unflatten",
    "unflatten_reference",
    "unpack",
]
