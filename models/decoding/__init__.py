"""Texts from a language model: tokens one after the other, of one text or of several at a time."""
