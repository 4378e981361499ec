"""Stores the tensors that a rank sent to other pipeline stages, so that a lost stage can replay iterations."""
