"""Helpers for tests and benchmarks of megatron_ft, and for users' tests of their own policies. Nothing outside this
folder imports it."""
