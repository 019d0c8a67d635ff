"""The coordinator: holds the model and the truth about the run."""
