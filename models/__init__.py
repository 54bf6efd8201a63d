"""Example models and the programs that run them. The library imports none of this."""
