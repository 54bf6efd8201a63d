"""A language model on a CPU: `python -m models.generate`."""

import gc


# What a start imports, reads and traces stays. Python's collector went through all of it again and again, which was a tenth of
# the time to the first token.
gc.set_threshold(1_000_000, 50, 100)
