"""Placement of expert replicas: replica counts, slots, survival, migration."""
