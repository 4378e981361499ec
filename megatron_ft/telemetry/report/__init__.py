"""A run as one page of HTML: its loss, its recoveries, and what each rank did in them."""
