"""Stores the tensors that a rank sent to other pipeline stages, for stages that replay iterations."""
