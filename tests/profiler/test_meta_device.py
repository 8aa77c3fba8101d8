"""In a trace the meta device runs fused attention, and answers questions about values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from protrain.profiler.meta_device import KnownIntegers, as_if_on_gpu


def test_attention_that_a_module_imported_by_its_name_is_fused_too() -> None:
    query = torch.empty(1, 2, 64, 8, device="meta", requires_grad=True)
    saved: list[int] = []

    def noted(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    usual = scaled_dot_product_attention
    with as_if_on_gpu(), torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        scaled_dot_product_attention(query, query, query, is_causal=True)
    assert 0 < max(saved) < 64 * 64, "no matrix of sequence x sequence is saved"
    assert scaled_dot_product_attention is usual is F.scaled_dot_product_attention


PACKED, ALONE = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]), torch.arange(5)[None]


@pytest.mark.parametrize(("positions", "packed"), [(PACKED, True), (ALONE, False)], ids=["packed", "alone"])
def test_questions_about_a_batch_s_integers_have_true_answers(positions: Tensor, packed: bool) -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    known = KnownIntegers()
    moved = known.moved(positions)
    with as_if_on_gpu(known):
        assert (masking.find_packed_sequence_indices(moved) is not None) is packed


def test_a_changed_tensor_is_not_known_any_more() -> None:
    known = KnownIntegers()
    moved = known.moved(torch.zeros(4, dtype=torch.int64))
    with as_if_on_gpu(known):
        last = moved[-1:]
        assert not bool((last == 1).all()), "it follows from the batch"
        moved.add_(1)
        assert bool((last == 1).all()), "nothing is known, and values are taken for regular"
