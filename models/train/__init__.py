"""Training of a GPT and of a ViT: `python -m models.train`."""
