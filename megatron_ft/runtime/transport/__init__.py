"""Moves tensors between ranks as bytes, whatever their dtype."""
