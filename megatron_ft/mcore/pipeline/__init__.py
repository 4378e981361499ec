"""Messages between pipeline stages. They are logged during training, and a replay reads them from the log."""
