"""Replica-aware token dispatch: which rows go to which copy of an expert, and the way back."""
