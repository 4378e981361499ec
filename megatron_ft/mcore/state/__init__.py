"""State of a rank at an iteration boundary: captured, carried, compared and restored."""
