"""Moves tensors of any dtype between ranks as bytes, and ends waits for ranks that are lost."""
