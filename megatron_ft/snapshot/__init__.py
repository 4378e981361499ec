"""Captures windows of state, keeps them in memory of other nodes and on storage, and gives them back."""
