"""Carries recovery plans out, through the protocol of ``runtime.engine``."""
