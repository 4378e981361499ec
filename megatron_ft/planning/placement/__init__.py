"""Placement of expert replicas on ranks: replica counts, slots, probability that all experts survive, migration."""
