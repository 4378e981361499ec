"""State by element range: which ranks have it, which need it, what moves."""
