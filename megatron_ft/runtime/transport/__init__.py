"""Process groups whose connections can be ended and replaced after the loss of a rank."""
