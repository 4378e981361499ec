"""Token dispatch for experts with several copies: sends each row to one of the copies, and returns the results."""
