"""Dense checkpoints through Megatron's ``dist_checkpointing``, committed by the project's own manifest."""
