"""Token loads to replica counts, to slots, to what survives and what moves."""
