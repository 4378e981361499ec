"""Tensors that a rank sent to other pipeline stages, kept for a stage that has to replay."""
