"""Modules to import in place of JAX's own, with its signatures and behaviour."""
