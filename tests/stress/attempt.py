"""Call a function that may fail."""


def attempt(function, *expected):
    """`(result, None)`, or `(None, error)` if it raises one of the `expected` classes."""
    try:
        return function(), None
    except expected as error:
        return None, error
