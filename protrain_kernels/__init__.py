"""Kernels of training with offloaded optimizer states, usable alone: Triton on GPUs, C threads on host memory.

Triton, C and the plain torch references give the same bits. Importing needs no GPU; the C source is compiled at first
use.
"""

from protrain_kernels.adam import AdamScalars, adam, adam_reference, adam_scalars
from protrain_kernels.checks import PADDING, TILE, padded, tiles
from protrain_kernels.flatten import flatten, flatten_reference
from protrain_kernels.host_adam import host_accumulate
from protrain_kernels.host_library import host_compiler_notice
from protrain_kernels.split_master import join, join_reference, split, split_reference
from protrain_kernels.sum_of_squares import sum_of_squares, sum_of_squares_reference

__all__ = [
    "PADDING",
    "TILE",
    "AdamScalars",
    "adam",
    "adam_reference",
    "adam_scalars",
    "flatten",
    "flatten_reference",
    "host_accumulate",
    "host_compiler_notice",
    "join",
    "join_reference",
    "padded",
    "split",
    "split_reference",
    "sum_of_squares",
    "sum_of_squares_reference",
    "tiles",
]
