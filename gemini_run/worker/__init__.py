"""What runs inside a training process. Never imports `gemini_run.agent`."""
