"""Failures for tests: schedules of failures, recorded traces, and injection of failures into a running job."""
