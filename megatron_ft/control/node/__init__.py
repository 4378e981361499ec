"""A node: its agent, the ranks that it starts, and the processes beside them."""
