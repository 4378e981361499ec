"""Messages between pipeline stages: logged while training, served in a replay."""
