"""The base class of a user's layer."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeAlias

import equinox as eqx
import jax
from jax.tree_util import tree_flatten

from .. import backends, xla
from ..core import Aliases, PyTree
from ..kernel import Kernel, as_tuple
from ..transform import DEFAULT_METHOD, Structure, check_typed, is_array, settings, typed
from . import _declarations as declarations
from ._bound_layer import bind_layer, check_no_views, named_arrays
from ._check import check
from ._class import check_class
from ._declarations import LayerClass
from ._fixed import LayerMeta, fix
from ._refs import indices
from ._rules import unwrapped, wrapped


# The name of a method, or a kernel of any kind.
LayerKernel: TypeAlias = str | Kernel


class _Name:
    """The name of an instance, for JAX, which names programs like the functions that they are of. A property would take it from
    the layers that have a field `__name__`.
    """

    def __get__(self, layer: object, cls: type) -> str:
        return cls.__name__


class Layer(eqx.Module, metaclass=LayerMeta):
    """An `equinox.Module` whose forward pass is your kernel, writing in place into XLA's own buffers.

    !!! example

        ```python
        class Scale(eqxcallback.Layer):
            weight: jax.Array
            vmap_method = "fold"  # one call for a whole batch

            def kernel(self, ctx, out, x):
                np.multiply(x, self.weight, out=np.asarray(out))

            def reference(self, x):
                return x * self.weight
        ```

    A subclass defines `kernel`, and `reference` or `out_type`; the rest is optional. It is called as
    `layer(*args, **kwargs)`, with the arguments that `kernel` takes after `out`; a `key=` that it does not take is ignored, as
    `equinox.nn.Sequential` gives every layer one. Arrays, in any PyTree of the layer or of its
    arguments, are operands; a `jax.Ref` is one that the kernel changes in place. All else is static and must be hashable. It
    works under every transformation of JAX. Instances that differ in their arrays alone share programs.

    **Methods:**

    - `kernel(self, ctx, out, *args, **kwargs) -> None`: writes the results into `out`. `self` is the layer with a read-only
        [`eqxcallback.Buffer`][] in place of each array, and so are the arguments; `out` has writeable ones, in the tree of the
        results. As the callback of [`eqxcallback.buffer_callback`][] otherwise.
    - `reference(self, *args, **kwargs)`: the same in pure JAX: the definition of the layer, its type, its derivatives, and
        its value where it has no kernel.
    - `out_type(self, *args, **kwargs)`: a PyTree of `jax.ShapeDtypeStruct`s, from arguments that have `shape` and `dtype`. By
        default the type of `reference`.
    - `backward(self, ctx, grads, args, out, cotangents) -> None`: the gradient as a kernel, for reverse mode. `args` are the
        arguments in the order of the signature; `out` is what `kernel` wrote and `cotangents` are its cotangents, zeros
        filled in. `grads` has the tree of `(self, *args)`, a Buffer to write at each leaf whose gradient is needed and `None`
        at others. Under `vmap`, a leaf with the shape of its primal is to be summed over the leading axes.
    - `residual_type(self, *args, **kwargs)`: if defined, `out` is `(out, residuals)` in `kernel` and in `backward`.
    - `jvp(self, args, tangents)`: JAX code that returns the tangents of the results. `tangents` has the tree of `args`, as
        `jax.jvp` takes it; `tangents.self` has that of the layer, which is `args.self`. By default the derivative of
        `reference`.
    - `batch(self, axis_size, in_axes, args)`: a batching rule of the layer's own, as `jax.custom_batching.custom_vmap` has it:
        JAX code that returns `(out, out_axes)`. Mapped axes are in front. It is about the arguments: where arrays of the
        layer are mapped, and for residuals, `vmap_method` holds.

    **Attributes of the class**, which like the methods are read when its first layer is made, and fixed from then on:

    - `vmap_method`: what kernels see under `vmap`. `"fold"` is one call: operands that are mapped have one leading axis, for
        nested maps as well, and those that are not have none. Or one of JAX's: `"sequential"`, `"sequential_unrolled"`,
        `"expand_dims"`, `"broadcast_all"`. If none is stated, it is `"sequential"`: the kernel sees one example and is called
        for each, and an [`eqxcallback.PerformanceWarning`][] says so once. `"threads"` is for kernels in C, C++ and Numba: what
        `"sequential"` does, in one call, for whose examples XLA's threads call the kernel side by side. With `"reference"` JAX
        maps the `reference` in the kernel's place.
    - `input_output_aliases`: `{input: output}`: results that overwrite an argument. An input is the name of a parameter of
        `kernel`, with all its arrays, or a flat index over the arrays of the call's arguments, or `"self.name"`; an output is
        a name or an index.
    - `command_buffer_compatible`: whether, on a GPU, XLA may record what the kernel launches and replay it without Python.
    - `has_side_effect`: whether the kernel must run even if its results are unused.
    - `on_error`: `"raise"`, or `"poison"`: a kernel that raises leaves NaN in its results (zero where there is none), and the
        error is raised by `eqxcallback.debug.barrier_wait()` or at the end of [`eqxcallback.raising`][].
    - `kernels`: in place of `kernel`, `{platform: kernel}`, or several in order of preference, of
        [`eqxcallback.NativeKernel`][]s, [`eqxcallback.CudaKernel`][]s, `TritonKernel`s, `PythonKernel`s or names of methods. The
        first one that supports the call runs, else `reference`, as in [`eqxcallback.Op`][].
    - `backward_kernels`: in place of `backward`, on some platforms, `{platform: kernel}`, of kernels that are not Python's. They
        take the arrays of the layer and the arguments, the results and residuals, and the cotangents of the results, and compute
        gradients, as in [`eqxcallback.Op`][]. Functions of them are called with the layer, then `grads, args, out,
        cotangents`. Where `backward` is defined as well, it runs if they do not support the call.
    - `sharding`: what may be split between devices beside the axes of `vmap`, as in [`eqxcallback.Op`][]: a rule over the
        arrays of the layer, of the arguments, then of the results and residuals.
    - `input_layouts`, `output_layouts`: the memory layouts that the kernel wants of the arrays of the arguments and results:
        for each, its axes from major to minor, as in `jax.ffi.ffi_call`, or `None` for row-major. `(1, 0)` is column-major, as
        BLAS has it. Axes of `vmap` are the most major ones. `backward` sees row-major arrays.

    **Raises:** `TypeError` or `ValueError` for a wrong declaration, when the layer is built, and when arguments do not fit it.
    [`eqxcallback.KernelError`][] from a call outside of `jit`, if the kernel raises.
    """

    vmap_method: ClassVar[str] = DEFAULT_METHOD
    input_output_aliases: ClassVar[Aliases] = {}
    command_buffer_compatible: ClassVar[bool] = False
    has_side_effect: ClassVar[bool] = False
    on_error: ClassVar[str] = "raise"
    kernels: ClassVar[Mapping[str, LayerKernel | Sequence[LayerKernel]] | None] = None
    backward_kernels: ClassVar[Mapping[str, LayerKernel | Sequence[LayerKernel]]] = {}
    sharding: ClassVar[str | None] = None
    input_layouts: ClassVar[Sequence[Sequence[int] | None] | None] = None
    output_layouts: ClassVar[Sequence[Sequence[int] | None] | None] = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        check_class(cls, Layer)

    def __check_init__(self) -> None:
        _check(type(self))

    def out_type(self, *args: PyTree, **kwargs: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
        return eqx.filter_eval_shape(getattr(self, "reference"), *args, **kwargs)  # noqa: B009 - it is optional

    @classmethod
    def register(cls) -> None:
        """Load the libraries of the class's native kernels, for programs of [`eqxcallback.load`][]."""
        for declared in (declarations.kernels_of(cls), cls.backward_kernels):
            for platform, kernels in declared.items():
                for kernel in as_tuple(kernels):
                    backends.register_library(kernel, platform, cls.__qualname__, for_each=cls.vmap_method == "threads")

    @classmethod
    def _has_own_out_type(cls) -> bool:
        return declarations.method(cls, "out_type") is not declarations.method(Layer, "out_type")

    # Type checkers take it for the name of the class itself, a str, which this leaves as it is.
    __name__ = _Name()  # type: ignore[assignment]

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature for `inspect.signature`, and for tools that show it or bind arguments by it."""
        return _signature(type(self))[0]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        cls = type(self)
        signature, count, takes_key = _signature(cls)
        if not takes_key:
            kwargs.pop("key", None)
        if kwargs or len(args) != count:
            try:
                args, kwargs = declarations.bind(signature, args, kwargs)
            except TypeError as error:
                raise TypeError(
                    f"{cls.__qualname__}: a call takes {signature}; got {len(args)} positional arguments and the keywords "
                    f"{sorted(kwargs)} ({error})."
                ) from None
        leaves, treedef = tree_flatten((self, args, kwargs))
        try:
            inputs = Structure(treedef, leaves, cls.__qualname__)
        except TypeError:  # it does not say whose argument it was
            check_no_views(self, args, kwargs)
            raise
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        refs = indices(arrays, cls.__qualname__)
        mutable = [arrays[i] for i in refs]
        for i, ref in zip(refs, mutable, strict=True):
            arrays[i] = ref[...]
        try:
            arrays, avals = typed(arrays)
        except TypeError:  # JAX does not say whose argument it was
            check_typed(named_arrays(self, args, kwargs), cls.__qualname__)
            raise
        bound = bind_layer(cls, inputs, avals, refs, settings())
        try:
            outs = xla.op_call(bound.call, *unwrapped(arrays, bound.input_keys))
        except ValueError as error:
            xla.check_devices(error, cls.__qualname__, named_arrays(self, args, kwargs))
            raise
        for ref, value in zip(mutable, outs[bound.num_results :], strict=False):
            ref[...] = value
        return bound.outputs.build(wrapped(outs[: bound.num_results], bound.output_keys))


@functools.lru_cache(maxsize=4096)
def _check(cls: LayerClass) -> None:
    check(cls)
    fix(cls)


@functools.lru_cache(maxsize=4096)
def _signature(cls: type) -> tuple[inspect.Signature, int | None, bool]:
    signature = declarations.signature_of(cls)
    return signature, declarations.is_positional(signature), declarations.takes_key(signature)
