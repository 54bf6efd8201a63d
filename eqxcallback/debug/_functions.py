"""The functions of users that programs call, checked while a program is traced: what fails in it may only be logged."""

from collections.abc import Sequence

from ..core import callable_name, check_runs, signature_of


def check_function(who: str, function: object, names: Sequence[str], with_device: object) -> None:
    """`function` takes as many arguments as there are `names`, and `device` too if `with_device`."""
    device = {"device": None} if with_device else {}
    form = f"fn({', '.join([*names, *(f'{name}={name}' for name in device)])})"
    if not callable(function):
        raise TypeError(
            f"{who}: expected a function {form}; got {function!r} of type {type(function).__name__}. Pass the function first."
        )
    check_runs(f"{who}({callable_name(function)})", form, function)
    signature = signature_of(function)
    if signature is not None:
        try:
            signature.bind(*names, **device)
        except TypeError as error:
            raise TypeError(
                f"{who}: expected a function {form}; got {callable_name(function)}, of the signature {signature} ({error})."
            ) from None
