"""Blocks have the tensors that transformers gives them, and save what autograd saves."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.activations import saved_activations
from bench.kernels.shapes import MODELS, SMALL_TENSORS, chunk_elements, tensor_shapes
from protrain.cli.shapes import SHAPES, shape_config

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODELS)
def test_a_block_is_that_of_transformers(name: str) -> None:
    config = shape_config(SHAPES[name])
    config.num_hidden_layers = 1
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    blocks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == 1]
    shapes = [tuple(parameter.shape) for parameter in blocks[0][0].parameters()]
    assert sorted(shapes) == sorted(tensor_shapes(name, whole=True))
    assert 0 <= chunk_elements(name, whole=True) - sum(torch.Size(shape).numel() for shape in shapes) < 128 * 16


def test_small_tensors_are_as_small_as_they_say() -> None:
    shapes = tensor_shapes(SMALL_TENSORS, whole=True)
    assert len(shapes) == 200
    assert all(1024 <= 2 * size <= 100 * 1024 for (size,) in shapes)


@pytest.mark.parametrize("name", ["gpt2-10b", "llama2-13b"])
def test_saved_activations_share_storages_and_hold_no_weights(name: str) -> None:
    saved = saved_activations(name, torch.device("cpu"), whole=False)
    storages = {tensor.untyped_storage().data_ptr() for tensor in saved}
    assert len(storages) < len(saved)  # views: what packing moves once
    assert any(not tensor.is_contiguous() for tensor in saved)
    assert not any(isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad for tensor in saved)
    assert len(saved) > 15
