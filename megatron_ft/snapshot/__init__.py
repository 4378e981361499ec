"""Captures windows of state, keeps them in memory of other nodes and on storage, and reads them back."""
