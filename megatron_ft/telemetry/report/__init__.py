"""A run as one page of HTML: what happened, what was lost, who did what to go on."""
