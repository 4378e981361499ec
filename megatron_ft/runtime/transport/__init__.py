"""Ends waits for ranks that are lost."""
