"""Boundary tensors that a rank has sent, kept for a neighbouring stage that has to go back."""
