"""Fixtures that these tests share with those of telemetry."""

from tests.unit.telemetry.conftest import config, run_dir

__all__ = ["config", "run_dir"]
