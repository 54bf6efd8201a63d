"""A process in which Triton interprets kernels: it decides that when it is imported, and elsewhere in the tests it compiles.

Run as a script, this reads requests from its input and answers on its output. `Interpreter` is the other end.
"""

import importlib
import inspect
import os
import pickle
import subprocess
import sys
import traceback

import numpy as np


# Elements around each array, which a kernel neither reads nor writes: more than a tile reaches.
GUARD = 1 << 14


class Interpreter:
    def __init__(self):
        env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-W", "error", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def __call__(self, module, kernel, grid, args, constants):
        """The arguments as the kernel leaves them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((module, kernel, grid, args, constants), self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self):
        self._process.communicate()


def _run(module, kernel, grid, args, constants):
    from numpy_tensor import NumpyTensor  # beside this script

    function = getattr(importlib.import_module(module), kernel)
    guarded = [_guarded(arg) if isinstance(arg, np.ndarray) else None for arg in args]
    inner = [arg if whole is None else _within(whole, arg.shape) for whole, arg in zip(guarded, args, strict=True)]
    # What a kernel computes of rows past the end, and does not store, may be anything.
    with np.errstate(over="ignore", invalid="ignore"):
        function[(grid,)](*[NumpyTensor(arg) if isinstance(arg, np.ndarray) else arg for arg in inner], **constants)
    for index, whole in enumerate(guarded):
        if whole is not None and not (np.isnan(whole[:GUARD]).all() and np.isnan(whole[-GUARD:]).all()):
            raise AssertionError(f"{kernel}: argument {index} was written out of bounds")
    return inner


def _guarded(array):
    """NaN around it: what is read there shows in the results."""
    whole = np.full(array.size + 2 * GUARD, np.nan, array.dtype)
    whole[GUARD : GUARD + array.size] = array.ravel()
    return whole


def _within(whole, shape):
    return whole[GUARD : whole.size - GUARD].reshape(shape)


def _mend_bfloat16():
    """Triton's interpreter keeps bf16 as integers: it truncates what it should round, and multiplies the integers."""
    import ml_dtypes
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def mended_cast(self, src, dst_type):
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(src.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(src.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    def mended_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar == tl.bfloat16:
            a, b = mended_cast(self, a, tl.float32), mended_cast(self, b, tl.float32)
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = mended_cast, mended_dot


def _patch_language_once():
    """Each call of a function would patch `triton.language` and put it back, which is a third of the time."""
    from triton.runtime import interpreter

    original, patched = interpreter._patch_lang, set()

    def patch(function):
        # It patches the modules that the function's own module has imported.
        modules = frozenset(value.__name__ for value in function.__globals__.values() if inspect.ismodule(value))
        if modules not in patched:
            original(function)
            patched.add(modules)
        return interpreter._LangPatchScope()  # has nothing to put back

    interpreter._patch_lang = patch


def _serve():
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    _mend_bfloat16()
    _patch_language_once()
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = _run(*request)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
