"""Recovery of a rank: from one membership to the next, and from stored state at a start."""
