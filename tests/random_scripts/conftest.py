"""Random scripts share the profiles of their models."""

from tests.distributed.conftest import shared_profiles

__all__ = ["shared_profiles"]
