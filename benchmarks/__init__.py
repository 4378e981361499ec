"""Scripts that measure every figure that the project states. Each claim has one script, and each measurement gives one
dated result."""
