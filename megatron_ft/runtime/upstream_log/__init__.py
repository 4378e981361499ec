"""Sent boundary tensors, kept for a neighbouring stage that has to replay."""
