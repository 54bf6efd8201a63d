"""A server that speaks OpenAI's protocol: `python -m models.serve`."""
