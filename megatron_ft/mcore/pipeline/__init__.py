"""Messages between pipeline stages: logged during training, read in a replay."""
