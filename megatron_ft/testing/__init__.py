"""Harness for tests and benchmarks, and for tests of your own policies. Nothing else in the package imports it."""
