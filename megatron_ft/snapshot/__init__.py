"""Captures windows of training state, keeps copies in the memory of other nodes and on storage, and reads them back."""
