"""The arguments of a function of the TVM-FFI ABI in one call: words become tensors, numbers and texts."""

import re
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from ..core import DType
from ..kernel import literal
from ._parameters import Array


# What an argument is, before two numbers: see csrc/ffi/tvm_ffi_call.cc.
_TENSOR, _INTEGER, _BOOL, _FLOAT, _TEXT, _NONE, _STREAM = range(7)
_INDEXED = re.compile(r"(?P<what>args|rets)\[\s*(?P<index>\d+)\s*\]")


class Arguments:
    """The words of an `arg_spec` become numbers and texts.

    **Arguments:**

    - `arrays`: of the call, by name; `groups`: all of a kind, in order.
    - `options`: those of the call, and what functions say.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        groups: Mapping[str, Sequence[Array]],
        options: Mapping[str, object],
        who: str,
    ) -> None:
        self._arrays = arrays
        self._groups = groups
        self._options = options
        self._who = who
        self.numbers: list[int] = []
        self.texts = ""

    def add(self, word: str) -> None:
        who = f"{self._who}: the word {word!r} of arg_spec"
        name = re.sub(r"\s*\[\s*(\d+)\s*\]", r"[\1]", word)
        if word in self._groups:
            for array in self._groups[word]:
                self._add_array(array)
        elif (match := _INDEXED.fullmatch(word)) is not None:
            group, index = self._groups[match["what"]], int(match["index"])
            if index >= len(group):
                raise ValueError(f"{who}: this call has {len(group)} {match['what']}.")
            self._add_array(group[index])
        elif name in self._arrays:
            self._add_array(self._arrays[name])
        elif word == "ctx.stream":
            self._add(_STREAM)
        elif (option := word.removeprefix("attrs.")) in self._options:
            self._add_value(self._options[option], who)
        elif (value := literal(word)) is not None:
            self._add_value(value[0], who)
        else:
            arrays, options = ", ".join(self._arrays) or "none", ", ".join(self._options) or "none"
            raise ValueError(
                f"{who}: expected args, rets, workspaces, args[i] or rets[i]; an array of the call ({arrays}); an option "
                f"({options}), also as attrs.NAME; ctx.stream; or a literal: 1, 0.5, True, None, \"'text'\"."
            )

    def _add(self, kind: int, first: int = 0, second: int = 0) -> None:
        self.numbers += (kind, first, second)

    def _add_array(self, array: Array) -> None:
        if array.index is None:
            self._add(_NONE)
            return
        dtype = jnp.dtype(array.aval.dtype)
        if _bits(dtype) < 8:
            raise ValueError(
                f"{self._who}: expected arrays whose elements have whole bytes, as DLPack has them; got {dtype.name}. Cast it in "
                "a function around the op."
            )
        self._add(_TENSOR, array.index)

    def _add_value(self, value: object, who: str) -> None:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None:
            self._add(_NONE)
        elif isinstance(value, bool):
            self._add(_BOOL, int(value))
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            self._add(_INTEGER, value)
        elif isinstance(value, float):
            self._add(_FLOAT, int(np.float64(value).view(np.int64)))
        elif isinstance(value, str) and "\0" not in value and _is_utf8(value):
            begin = len(self.texts.encode())
            self.texts += value
            self._add(_TEXT, begin, len(value.encode()))
        else:
            raise ValueError(f"{who}: expected a bool, an int of 64 bits, a float, a text or None; got {value!r}.")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character
        return False
    return True


def _bits(dtype: DType) -> int:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.finfo(dtype).bits
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8
