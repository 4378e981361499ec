"""Report of a run as one HTML page: the loss, the recoveries, and what each rank did during a recovery."""
