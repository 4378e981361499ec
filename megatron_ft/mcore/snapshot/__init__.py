"""Captures windows of a rank's state while it trains, and restores them when it starts."""
