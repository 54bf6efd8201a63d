"""Texts to the tokens of a model, and back."""
