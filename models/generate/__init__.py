"""A language model on a CPU: `python -m models.generate`."""
