"""What the project's dispatch modes have in common."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class RuntimeMode(TorchDispatchMode):
    """A mode that watches what runs: a compiled forward is compiled as it would be without, and seen when it runs.

    Of such a forward it sees what the compiler left to libraries. Operators of operators pass through.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch's name for the first of these."""
        return True
