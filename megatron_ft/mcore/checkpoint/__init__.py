"""Dense checkpoints in the format of Megatron's ``dist_checkpointing``, with a manifest that makes them complete."""
