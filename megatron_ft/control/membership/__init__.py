"""The membership of a job as a pure state machine, without clocks, files or sockets."""
