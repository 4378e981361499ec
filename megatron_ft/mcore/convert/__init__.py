"""Converts weights between dense checkpoints and folders of other projects."""
