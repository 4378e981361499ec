"""How the processes of a job are started."""
