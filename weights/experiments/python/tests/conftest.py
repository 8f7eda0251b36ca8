"""Fixtures for all tests of this folder."""

from common import folder, run_config  # noqa: F401
