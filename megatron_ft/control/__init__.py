"""Agrees: one controller per job, one agent per node, one worker client per rank. No torch."""
