"""What a layout costs: parameters, bytes and microbatches per rank."""
