"""What runs in a node's agent. Never imports `gemini_run.worker`."""
