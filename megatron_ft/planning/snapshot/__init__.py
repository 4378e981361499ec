"""Which operators are captured at which iteration, and where the captured bytes go."""
