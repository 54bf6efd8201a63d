"""Errors of users' handlers as users see them, and XLA's complaints about how handlers are called."""

import logging
import pickle
import subprocess
import sys
import traceback
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc

from .. import one_device
from ..debug.harmful import library, op


X = jnp.arange(3.0)
TYPES = "(float32[3]) -> (float32[3])"

refuse = op("Refuse", lambda x, *, text, is_invalid: x)


def invalid(x):
    return refuse(x, text="x is odd", is_invalid=True)


def internal(x):
    return refuse(x, text="no room;\nreally", is_invalid=False)


def test_an_eager_error():
    with pytest.raises(ValueError, match=r"^mine\[native\]: kernel Refuse: x is odd \[failure \d+\]") as caught:
        invalid(X)
    error = caught.value
    assert isinstance(error, eqxc.KernelError)
    assert (error.layer, error.name_stack, error.operands) == ("mine", "", TYPES)
    assert type(error.original) is ValueError
    assert str(error.original) == "x is odd"
    assert error.__cause__ is error.original
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ValueError)
    assert str(again) == str(error)


def test_other_codes_are_no_value_errors():
    with pytest.raises(
        eqxc.KernelError, match=r"kernel Refuse: no room; \[failure \d+\]\nreally\nnative lane, "
    ) as caught:
        internal(X)
    assert not isinstance(caught.value, ValueError)
    assert type(caught.value.original) is RuntimeError


def test_the_frames_of_the_user_are_there_once():
    with pytest.raises(eqxc.KernelError) as caught:
        invalid(X)
    assert "".join(traceback.format_exception(caught.value)).count("in invalid") == 1


def test_under_jit():
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"^INVALID_ARGUMENT: .*mine\[native\]: kernel Refuse: x is odd"
    ):
        jax.block_until_ready(jax.jit(invalid)(X))
    with pytest.raises(ValueError, match=r"mine\[native\]: kernel Refuse: x is odd") as caught, eqxc.raising():
        jax.block_until_ready(jax.jit(invalid)(X))
    assert isinstance(caught.value, eqxc.KernelError)


def test_each_is_logged_once(caplog):
    with caplog.at_level(logging.ERROR, "eqxcallback"), pytest.raises(eqxc.KernelError):
        invalid(X)
    assert [record.getMessage().split(" [")[0] for record in caplog.records] == [
        "mine[native]: kernel Refuse: x is odd"
    ]


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        ((X, X), {}, "Wrong number of arguments: expected 1 but got 2"),
        ((X.astype(jnp.int32),), {}, "Wrong buffer dtype: expected F32 but got S32"),
        ((X,), {"more": 1}, "Wrong number of attributes: expected 2 but got 3 with name.*more"),
        ((X,), {"text": 3}, "Failed to decode all FFI handler operands"),
    ],
)
def test_what_xla_itself_says(args, options, text):
    any_call = eqxc.Op(
        "any_call", {"cpu": eqxc.NativeKernel("Refuse", library())}, lambda x, *more, **options: x.astype(jnp.float32)
    )
    options = {"text": "", "is_invalid": True} | options
    with pytest.raises(ValueError, match=rf"(?s)any_call\[native\]: kernel Refuse: .*{text}"):
        any_call(*args, **options)


def test_a_static_field_that_is_not_named():
    """XLA says how many attributes are missing. A field is one only if it is named."""

    class Refuse(eqxc.Layer):
        text: str = eqx.field(static=True)
        kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("Refuse", library())}

        def reference(self, x):
            return x

    remedy = r"Wrong number of attributes: expected 2 but got 0\. A layer's static fields .* attributes=\('k',\)"
    with pytest.raises(ValueError, match=rf"Refuse\[native\]: kernel Refuse: .*{remedy}"):
        Refuse("odd")(X)
    with pytest.raises(jax.errors.JaxRuntimeError, match=remedy):
        jax.block_until_ready(jax.jit(Refuse("odd").__call__)(X))


def test_two_ops_of_one_kernel():
    """An eager call knows which of them it is. A program does not."""
    kernel = eqxc.NativeKernel("LeaveLast", library())
    first, second = (eqxc.Op(name, {"cpu": kernel}, lambda *x: x[0]) for name in ("first", "second"))
    first(X)
    with pytest.raises(eqxc.KernelError, match=r"^second\[native\]: kernel LeaveLast: .*Wrong number of arg") as caught:
        second(X, X)
    assert caught.value.layer == "second"
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"first or second\[native\]: kernel LeaveLast: .*Wrong number"
    ):
        jax.block_until_ready(jax.jit(second)(X, X))


def test_ops_of_this_package():
    """Their handlers name the op themselves."""
    options = {"eps": 0.0, "center": False, "present": 1}
    norm = eqxc.Op(
        "other", {"cpu": eqxc.NativeKernel("norm", out_type=lambda x, **_: X)}, lambda x, *, eps, center, present: X
    )
    with pytest.raises(ValueError, match=r"^norm\[native\]: expected .* \[failure") as caught:
        norm(jnp.ones((2, 2)), **options)
    assert isinstance(caught.value, eqxc.KernelError)
    assert caught.value.layer == "norm"


@pytest.mark.parametrize(
    ("symbol", "what"),
    [
        ("Relu", r"crashed \(Segmentation fault\)"),
        ("Silent", "did not answer"),
        ("Leaves", "ended the process with status 4"),
        ("Throws", r"threw a C\+\+ exception"),
        ("Forever", r"did not answer within 0\.2 s"),
    ],
)
def test_a_function_that_is_no_handler(symbol, what, monkeypatch):
    from eqxcallback.xla.handles import _libraries

    if symbol == "Forever":
        monkeypatch.setattr(_libraries, "_SECONDS", 0.2)
    plain = eqxc.Op("plain", {"cpu": eqxc.NativeKernel(symbol, library())}, lambda x: x)
    text = (
        rf"plain\[native\]: expected an XLA FFI handler; got the function '{symbol}' of .*libharmful\.so, which {what} when "
        rf"it was asked .*XLA_FFI_DEFINE_HANDLER_SYMBOL\({symbol}, \.\.\.\), or pass it as a CKernel\."
    )
    for call in (plain, jax.jit(plain), lambda x: plain.register()):
        with pytest.raises(ValueError, match=text):
            call(X)


def test_a_handler_is_asked_once(monkeypatch):
    from eqxcallback import _ext
    from eqxcallback.xla.handles import _libraries

    asked = []
    describe = _ext.describe_function
    monkeypatch.setattr(_libraries, "_answers", {})
    monkeypatch.setattr(_ext, "describe_function", lambda *args: asked.append(args) or describe(*args))
    for name in ("a", "b"):
        eqxc.Op(name, {"cpu": eqxc.NativeKernel("Right", library())}, lambda x: 2 * x)(X)
    assert len(asked) == 1


def test_handlers_without_a_front():
    """There is a fixed number of fronts. A handler beyond them is registered as it is."""
    code = """
import ctypes, sys
import jax, numpy as np, eqxcallback as eqxc
from eqxcallback import _ext
right = ctypes.cast(ctypes.CDLL(sys.argv[1]).Right, ctypes.c_void_p).value
while _ext.front(right, "Right", True, 0)[0] >= 0:
    pass
op = lambda symbol: eqxc.Op("mine", {"cpu": eqxc.NativeKernel(symbol, sys.argv[1])}, lambda x, **_: 2 * x)
with eqxc.debug.checked():
    print(op("Right")(np.ones(3, np.float32)))
try:
    op("Refuse")(np.ones(3, np.float32), text="x is odd", is_invalid=True)
except jax.errors.JaxRuntimeError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(library())]
    environment = {**one_device.environment(), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "[2. 2. 2.]\nINVALID_ARGUMENT: x is odd\n", result.stderr


def test_a_text_that_is_not_utf8():
    odd = op("Latin1", lambda x: x)
    with pytest.raises(Exception, match=r"mine\[native\]: kernel Latin1: caf\\xe9 is closed"):
        odd(X)
