"""The training loop, from a rank's start to its end."""
