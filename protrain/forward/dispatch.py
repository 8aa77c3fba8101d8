"""The base class of dispatch modes that must not change what is compiled."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class RuntimeMode(TorchDispatchMode):
    """A dispatch mode that only watches. A forward is compiled as it would be without the mode, and seen when it runs.

    Inside a compiled forward the mode sees only the operators that the compiler left to libraries. Operators that take
    other operators pass through.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch that compilation ignores this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch puts a guard against the compiler around every call of the mode.

        It would take as long as the rest of the call, and is not needed: the compiler leaves the code of this package
        alone (:func:`protrain.forward.compilation.compile_blocks`).
        """
        return False
