"""The arguments of a call, which `check` is given: wrong ones are one error, and not one in each row."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from ..core import Value
from ..layer import Layer
from ..layer._declarations import signature_of, takes_key
from ..transform import Op
from ._subject import Subject, kernels_of


def without_ignored_key(target: Any, options: Mapping[str, object]) -> Mapping[str, object]:
    """The options of a call without a `key` that the layer drops: its reference does not take one either."""
    if "key" not in options or not isinstance(target, Layer) or takes_key(signature_of(type(target))):
        return options
    return {name: value for name, value in options.items() if name != "key"}


def check_arguments(
    it: Subject, target: Any, args: Sequence[Value], options: Mapping[str, object], own: Iterable[str]
) -> None:
    """Raise the `TypeError` of a call whose arguments do not fit the signature.

    **Arguments:**

    - `own`: names of the options of `check` itself, which may have been meant.
    """
    signature = _signature(target)
    if signature is None or _fits(signature, args, options):
        return
    try:
        jax.eval_shape(
            it.call_tree, *it.arrays()
        )  # the signature may be one of a function inside, and a call takes more
    except TypeError as error:
        hint = "" if options.keys() <= signature.parameters.keys() else f" check itself has {', '.join(own)}."
        raise TypeError(f"testing.check: {str(error).rstrip('.')}.{hint}") from None


def _signature(target: Any) -> inspect.Signature | None:
    """The parameters of a call, as far as they can be known."""
    try:
        if isinstance(target, Layer):
            return signature_of(type(target))
        if isinstance(target, Op):
            target = target.reference or next((kernel.out_type for kernel in kernels_of(target).values()), None)
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def _fits(signature: inspect.Signature, args: Sequence[Value], options: Mapping[str, object]) -> bool:
    try:
        signature.bind(*args, **options)
    except TypeError:
        return False
    return True
