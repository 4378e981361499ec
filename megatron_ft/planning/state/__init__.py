"""State by element range: who holds it, who needs it, what moves."""
