"""Saves and loads dense checkpoints in the format of Megatron's ``dist_checkpointing``, with a manifest."""
