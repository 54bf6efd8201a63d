"""A process in which Triton interprets kernels: it decides that when it is imported, and elsewhere it compiles.

Run as a script, this reads requests from its input and answers on its output; `_triton.py` is the other end. It imports nothing
of ours: functions come as their source texts.
"""

import importlib
import inspect
import linecache
import os
import pickle
import sys
import traceback
from typing import Any, ClassVar

import numpy as np


# Elements around each array, which a kernel neither reads nor writes: more than a tile reaches.
_BAND = 1 << 14


class _Storage:
    """Memory of the host, which is the device: there is nothing to copy."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return self

    def copy_(self, other):
        assert self.data_ptr() == other.data_ptr()


class _Tensor:
    """A NumPy array as the interpreter wants its tensors: a torch tensor, of which it uses this much."""

    device = "cpu"

    def __init__(self, array: np.ndarray):
        assert array.flags.c_contiguous
        self.array = array
        self.dtype = array.dtype.name  # also "bfloat16", where the dtype is of ml_dtypes
        self.shape = array.shape

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return _Storage(self.array)

    def storage_offset(self):
        return 0

    def size(self):
        return self.shape

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def new_empty(self, *_, **__):
        return _Tensor(self.array)

    def set_(self, storage, *_):
        self.array = storage.array


class _Functions:
    """The functions of one kernel, made of what `TritonFunction` says of them."""

    _known: ClassVar[dict[bytes, Any]] = {}

    @classmethod
    def kernel(cls, portable: bytes) -> Any:
        if portable not in cls._known:
            cls._known[portable] = cls._made(pickle.loads(portable), len(cls._known))
        return cls._known[portable]

    @staticmethod
    def _made(described: list[dict[str, Any]], number: int) -> Any:
        """The first one. They may call each other.

        **Arguments:** `number`: which kernel it is, as no two files may have one name.
        """
        import triton
        import triton.language as tl

        namespaces, made = [], []
        for i, function in enumerate(described):
            # Triton reads the source again, and rewrites it.
            file = f"<{function['name']} {i} of {number}>"
            text = function["source"]
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            namespace: dict[str, Any] = {"__name__": "emulated", "_language": tl}  # Triton looks for it, and patches it
            for name, (kind, value) in function["names"].items():
                if kind != "function":
                    namespace[name] = _resolved(kind, value)
            exec(compile(text, file, "exec"), namespace)
            namespaces.append(namespace)
            made.append(triton.jit(namespace[function["name"]]))
        for function, namespace in zip(described, namespaces, strict=True):
            for name, (kind, value) in function["names"].items():
                if kind == "function":
                    namespace[name] = made[value]
        return made[0]


def _resolved(kind: str, value: Any) -> Any:
    if kind == "module":
        return importlib.import_module(value)
    if kind == "attribute":
        module, name = value
        return getattr(importlib.import_module(module), name)
    return pickle.loads(value)


def _run(
    portable: bytes,
    grid: tuple[int, ...],
    memory: list[tuple[bytes, str, int]],
    pointers: dict[str, int | None],
    scalars: dict[str, Any],
    constants: bytes,
) -> tuple[list[bytes], list[int]]:
    """The memory as the kernel leaves it, and which parts of it were overrun."""
    import ml_dtypes

    function = _Functions.kernel(portable)
    values = scalars | pickle.loads(constants)
    blocks, inner = [], []
    for data, dtype, size in memory:
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        block = np.full((size + 2 * _BAND) * kind.itemsize, 0xFF, np.uint8)  # NaN: what is read there shows in results
        place = block[_BAND * kind.itemsize :][: size * kind.itemsize]
        place[...] = np.frombuffer(data, np.uint8)
        blocks.append(block)
        inner.append(place.view(kind))
    tensors = {name: None if i is None else _Tensor(inner[i]) for name, i in pointers.items()}
    # What a kernel computes of rows past the end, and does not store, may be anything.
    with np.errstate(all="ignore"):
        function[grid](**tensors, **values)
    overrun = [
        i
        for i, (block, place) in enumerate(zip(blocks, inner, strict=True))
        if (block[: _BAND * place.itemsize] != 0xFF).any()
        or (block[block.size - _BAND * place.itemsize :] != 0xFF).any()
    ]
    return [place.tobytes() for place in inner], overrun


def _mend_bfloat16() -> None:
    """Triton's interpreter keeps bf16 as integers: it truncates what it should round, and computes with the integers."""
    import ml_dtypes
    import triton.language as tl
    from triton.runtime import interpreter

    bf16, handle = tl.bfloat16, interpreter.TensorHandle
    builder: Any = interpreter.InterpreterBuilder

    def is_bf16(value):
        return isinstance(value, handle) and value.dtype.scalar == bf16

    def widened(value):
        if not is_bf16(value) or value.data.dtype != np.uint16:
            return value
        return handle(value.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)

    def narrowed(value):
        if value.data.dtype != np.float32:  # of a comparison
            return value
        return handle(value.data.astype(ml_dtypes.bfloat16).view(np.uint16), bf16)

    cast = builder.cast_impl

    def mended_cast(self, src, dst_type):
        if is_bf16(src) and dst_type.scalar != bf16:
            return cast(self, widened(src), dst_type)
        if dst_type.scalar == bf16 and not is_bf16(src):
            return narrowed(cast(self, src, tl.float32))
        return cast(self, src, dst_type)

    def in_f32(operation):
        def mended(self, *args):
            if not any(map(is_bf16, args)):
                return operation(self, *args)
            return narrowed(operation(self, *map(widened, args)))

        return mended

    dot = builder.create_dot

    def mended_dot(self, a, b, *rest):  # sums up in the dtype of the others
        return dot(self, widened(a), widened(b), *rest)

    def of_tensors(apply):
        def mended(self, input):
            if not any(is_bf16(tensor.handle) for tensor in input):
                return apply(self, input)
            wide = [tl.core.tensor(widened(tensor.handle), tensor.type.with_element_ty(tl.float32)) for tensor in input]
            results = apply(self, wide)
            results = results if isinstance(results, list | tuple) else (results,)
            return [
                tl.core.tensor(narrowed(tensor.handle), tensor.type.with_element_ty(bf16))
                if is_bf16(given.handle) and tensor.handle.data.dtype == np.float32
                else tensor
                for tensor, given in zip(results, input, strict=False)
            ]

        return mended

    builder.cast_impl, builder.create_dot = mended_cast, mended_dot
    if not hasattr(builder, "get_bf16"):  # Triton 3.6
        builder.get_bf16 = lambda self, value: handle(np.array([value], ml_dtypes.bfloat16).view(np.uint16), bf16)
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(builder, name, in_f32(getattr(builder, name)))
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        setattr(kind, "apply_impl", of_tensors(kind.apply_impl))  # noqa: B010 - type checkers would not have it


def _patch_language_once() -> None:
    """Each call of a function would patch `triton.language` and put it back, which is a third of the time."""
    from triton.runtime import interpreter

    module: Any = interpreter
    original, patched = module._patch_lang, set()

    def patch(function):
        # It patches the modules that the function's own module has imported.
        modules = frozenset(value.__name__ for value in function.__globals__.values() if inspect.ismodule(value))
        if modules not in patched:
            original(function)
            patched.add(modules)
        return module._LangPatchScope()  # has nothing to put back

    module._patch_lang = patch


def _serve() -> None:
    # What a kernel prints goes elsewhere.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    problem = None
    try:
        _mend_bfloat16()
        _patch_language_once()
    except Exception:
        problem = f"this version of Triton has another interpreter: {traceback.format_exc()}"
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = problem or _run(*request)
        except Exception as error:
            cause = error.__cause__ or error
            answer = f"{type(cause).__name__}: {cause}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
