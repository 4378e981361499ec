"""Executes recovery plans through the protocol of ``runtime.engine``."""
