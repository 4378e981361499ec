"""Captures snapshots of training state, stores copies in other nodes' memory and on storage, and reads them back."""
