"""Views of a weight as another type, conjugate or negative: their gradients are the plain model's under every plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.engine.harness import CKPT, NONE, SWAP, Spec, check_equal_to_plain, seeded
from tests.engine.residual import batches

WIDTH = 32
SPECS = tuple(Spec(persist, "least", (mode,)) for persist in ("none", "some") for mode in (NONE, CKPT, SWAP))
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "complex": torch.view_as_complex,
    "conjugate": lambda weight: torch.view_as_complex(weight).conj(),
    "conjugate rows": lambda weight: torch.view_as_complex(weight).unsqueeze(0).mH.squeeze(-1),
    "negative part": lambda weight: torch.complex(weight[..., 0], torch.view_as_complex(weight).conj().imag),
    "as parts again": lambda weight: torch.view_as_complex(torch.view_as_real(torch.view_as_complex(weight)) * 2),
}


class Spectral(nn.Module):
    """A filter in frequency space, whose real parameter of shape (..., 2) forward takes for complex numbers."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = FORMS[form]
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.5)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.rfft(x) * self.form(self.weight)
        return torch.tanh(self.linear(x + torch.fft.irfft(filtered, n=WIDTH)))


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_seen_in_another_form_has_the_plain_gradient(form: str, device: torch.device) -> None:
    def make() -> nn.Module:
        with seeded():
            blocks = nn.Sequential(*(Spectral(form) for _ in range(3)))
            return nn.Sequential(nn.Linear(8, WIDTH), blocks, nn.Linear(WIDTH, 4))

    check_equal_to_plain(make, batches(2), device=device, specs=SPECS[list(FORMS).index(form) % 2 :: 2])
