"""Executes recovery plans: calls the methods of a ``runtime.engine.ReplayEngine`` in the order of the plan."""
