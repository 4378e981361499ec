"""State as ranges of tensor elements: which ranks have a range, which ranks need it, and which transfers send it."""
