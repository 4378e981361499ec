"""Renders a run's report as one HTML page: the loss, the recoveries, and what each rank did during a recovery."""
