"""One mathematical operation, with a kernel for each platform and a definition in pure JAX."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from jax.tree_util import tree_flatten, tree_unflatten

from .. import backends, xla
from ..core import PyTree, callable_name, check_aliases, identity, signature_of, strict_statics
from ..kernel import Frozen, Kernel, as_tuple
from ._batching import DEFAULT_METHOD, METHODS, REFERENCE, is_stated, uses_threads, why_no_threads
from ._bind_op import bind_op, named_operands
from ._choice import Implementation, check_implementation
from ._options import Options, are_same
from ._settings import settings
from ._structure import check_typed, typed


@dataclasses.dataclass(frozen=True)
class Op:
    """One mathematical operation: its kernels, and its definition in pure JAX.

    !!! example

        ```python
        saxpy = eqxcallback.Op(
            "saxpy",
            kernels={"cpu": eqxcallback.NativeKernel("saxpy", library="libsaxpy.so")},
            reference=lambda x, y, *, a: a * x + y,
            vmap_method="broadcast_all",
        )
        z = saxpy(x, y, a=2.0)
        ```

    A call takes arrays, or PyTrees of arrays, by position, and static options by keyword. An argument that is `None` is an absent
    operand: `None` to kernels in Python and Triton, a null pointer in CUDA C++, and nothing to native ones. It works under `jit`,
    `vmap`, `grad`, `jvp`, `scan`, `checkpoint` and `shard_map`.

    **Arguments:**

    - `name`: of the operation, for errors and programs.
    - `kernels`: `{platform: kernel}`, or several in order of preference, where a platform is `"cpu"`, `"cuda"` or `"rocm"`. The
        first one that takes the call runs, else the reference. [`eqxcallback.inspect`][] shows which kernel runs, and why each
        kernel before it does not. Two fields of each kernel decide:

        - `supports`: a function `(types, **options)` that returns `True`, or in words why the kernel does not take the call.
            `types` is a named tuple of the op's arguments, or of a layer and its arguments: `jax.ShapeDtypeStruct`s with the
            shapes that the kernel would see, under `vmap` with more axes, and `None` for what is absent. By default a kernel
            takes every call.
        - `only_if_chosen`: whether the kernel runs only where `implementation` names its kind, and never by default.

    - `reference`: a function of the same arguments and options in pure JAX. It defines the result's type, the operation's
        derivatives, and its value where there is no kernel. Without one there are no derivatives, and each kernel needs
        an `out_type`.
    - `vmap_method`: how `vmap` calls the kernel: `"fold"` or another `vmap_method` of [`eqxcallback.Layer`][]. If none is
        stated it is `"sequential"`, as in a layer. Or one for each parameter, `{name: method}`, where the axes of nested `vmap`s
        stay apart, the outermost first:

        - `"broadcast_all"`: the kernel sees all mapped axes in front, also of an operand that is not mapped;
        - `"fold"`: the kernel sees the axes from the outermost one that maps this operand inwards, and nothing in front of an
            operand that is not mapped;
        - `"expand_dims"`: the kernel sees all mapped axes in front, of size 1 where the operand is not mapped;
        - `"sequential"`: the kernel takes no such axis; if this operand is mapped, the kernel is called for each example. A
            parameter that the mapping lacks is sequential;
        - `"reference"`: the same, but that JAX maps the `reference` in the kernel's place, unless a call chooses the kernel.

        - `"threads"`: for kernels without Python: XLA's threads share the examples of this operand, in one call. See
            [`eqxcallback.Layer`][].

        The arrays of one argument, a PyTree, go together: if one of them is mapped, all have the axes. An operand that a result
        overwrites always has all axes.

    - `backward`: the kernel of the gradients, for all platforms that have one forward; or `{platform: kernel}`, or several in
        order of preference. It runs where a kernel ran forward whose operands it `supports` as well. A `PythonKernel` is
        `body(ctx, grads, args, out, cotangents, **options)`, as `backward` of [`eqxcallback.Layer`][] is. Others take the flat
        arguments, results and cotangents; see [`eqxcallback.NativeKernel`][] and [`eqxcallback.CudaKernel`][] for their results.
        Without one, gradients are those of `reference`.
    - `sharding`: what may be split between devices under plain `jit`, a name for each dimension of each flat operand and
        result: `"... d, d -> ... d"`. A name that all results have may be split, so that each device calls the kernel on its
        own part, and an operand that has the length 1 there has all of it; `_` is whole, and `(d _)` has several elements for
        each of `d`. An absent operand may have a term. Axes
        of `vmap` may always be split. By default nothing else is. Or a function of the arguments' types and the options that
        returns the rule, or `None`.
    - `backward_reads_results`: whether `backward` reads the results of the op, or a function of the arguments' types and the
        options that says so. If not, it gets the cotangents in their place, and the results are neither kept for it nor computed
        for its sake.
    - `backward_ignores`: what `backward` does not read: names of parameters, as the kernel of a softmax does not read $x$, and
        numbers of results. Or a function that returns them of the names of the parameters that need a gradient. In the place of
        such an operand the kernel gets a result that it reads, or else a cotangent, and a program does not keep the operand for
        it. If none of these has the type of the operand, it gets the operand.
    - `implementation`: which kind of kernels runs, see [`eqxcallback.Op.using`][].

    **Raises:** `TypeError` or `ValueError` for a wrong declaration, and when arguments do not fit it.
    """

    name: str
    kernels: Mapping[str, Kernel | Sequence[Kernel]]
    reference: Callable[..., PyTree] | None = None
    vmap_method: str | Mapping[str, str] = DEFAULT_METHOD
    backward: Kernel | Mapping[str, Kernel | Sequence[Kernel]] | None = None
    sharding: str | Callable[..., str | None] | None = None
    backward_reads_results: bool | Callable[..., bool] = True
    backward_ignores: Collection[str | int] | Callable[[frozenset[str]], Collection[str | int]] = ()
    implementation: Implementation = "auto"
    # Two ops that differ in these alone are not one: what is known of a bound op is said of the other.
    _states_method: bool = dataclasses.field(init=False, repr=False, default=False)
    _functions: tuple[Any, ...] = dataclasses.field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        who = f"Op({self.name})"
        object.__setattr__(self, "_states_method", is_stated(self.vmap_method))
        if isinstance(self.vmap_method, Mapping):
            object.__setattr__(self, "vmap_method", Frozen(self.vmap_method, f"{who}.vmap_method"))
        object.__setattr__(self, "kernels", _candidates(self.kernels, "kernels", who))
        for platform, kernel in self._every_kernel:
            check_aliases(kernel.aliases, who)
            if self.reference is None and kernel.out_type is None:
                raise ValueError(f"{who}: the kernel for {platform} needs an out_type, because there is no reference.")
        if isinstance(self.backward, Mapping):
            object.__setattr__(self, "backward", _candidates(self.backward, "backward", who))
        elif self.backward is not None:
            every = dict.fromkeys(self._kernels, self.backward)
            object.__setattr__(self, "backward", _candidates(every, "backward", who))
        if missing := [platform for platform in self._backward if platform not in self._kernels]:
            raise TypeError(
                f"{who}: expected backward to be a kernel, or kernels for platforms that have one forward; got one for "
                f"{missing[0]}."
            )
        if self.sharding is not None and not isinstance(self.sharding, str) and not callable(self.sharding):
            raise TypeError(
                f"{who}: expected sharding to be a rule such as '... d, d -> ... d', or a function that returns one; got "
                f"{self.sharding!r}."
            )
        if self.reference is not None and not callable(self.reference):
            raise TypeError(f"{who}: expected reference to be a function; got {self.reference!r}.")
        try:
            # Mappings have no hash. Two ops with the same fields are one, and those of functions are enough to tell most apart.
            fields = (self.name, self.reference, frozenset(self._kernels.items()), self.sharding, self.implementation)
            object.__setattr__(self, "_hash", hash(fields))
        except TypeError as error:
            raise TypeError(
                f"{who}: expected reference and out_type to be hashable, as functions are; got {self.reference!r} ({error}). "
                "Wrap a Module in a function of its arrays."
            ) from None
        object.__setattr__(self, "_functions", tuple(map(identity, self._every_function)))
        if self.reference is None and not any(self._kernels.values()):
            raise ValueError(f"{who}: expected a kernel or a reference; got neither.")
        check_implementation(self.implementation, self.name, self._kernels, self.reference)
        self._check_defaults(who)
        self._check_vmap_method(who)
        if not callable(self.backward_ignores):
            self._check_ignored(self.backward_ignores)
            object.__setattr__(self, "backward_ignores", tuple(self.backward_ignores))

    def _check_defaults(self, who: str) -> None:
        """Each function takes what a call leaves out from its own signature, so they have to agree."""
        expected = _defaults_of(self.reference)
        for function in self._every_function:
            for name, default in _defaults_of(function).items():
                if name in expected and not are_same(default, expected[name]):
                    raise ValueError(
                        f"{who}: expected one default of {name}; got {expected[name]!r} in its reference, and {default!r} in "
                        f"{callable_name(function)}. A call without {name} would compute with both: give both the same one."
                    )

    def _check_vmap_method(self, who: str) -> None:
        methods = [self.vmap_method] if isinstance(self.vmap_method, str) else self.vmap_method.values()
        if REFERENCE in methods and self.reference is None:
            raise ValueError(f'{who}: expected a reference for vmap_method="{REFERENCE}"; got none.')
        if isinstance(self.vmap_method, str):
            if self.vmap_method not in METHODS:
                raise ValueError(
                    f"{who}: expected vmap_method to be one of {METHODS}, or a mapping; got {self.vmap_method!r}."
                )
        else:
            self._check_vmap_methods(who, self.vmap_method)
        if uses_threads(self.vmap_method):
            of_backward = ((p, kernel) for p, kernels in self._backward.items() for kernel in kernels)
            every = (*self._every_kernel, *of_backward)
            for reason in filter(None, (why_no_threads(*pair) for pair in every)):
                raise ValueError(f"{who}: {reason}")

    def _check_vmap_methods(self, who: str, declared: Mapping[str, str]) -> None:
        for name, method in declared.items():
            if method not in METHODS:
                raise ValueError(f"{who}: expected vmap_method[{name!r}] to be one of {METHODS}; got {method!r}.")
        self._check_parameters(who, "vmap_method", declared)

    def _check_ignored(self, ignored: object, num_results: int | None = None) -> None:
        who = f"Op({self.name})"
        if isinstance(ignored, str) or not isinstance(ignored, Collection):
            raise TypeError(
                f"{who}: expected backward_ignores to be names of parameters and numbers of results; got {ignored!r}."
            )
        self._check_parameters(who, "backward_ignores", (name for name in ignored if not isinstance(name, int)))
        numbers = [name for name in ignored if isinstance(name, int)]
        if wrong := [i for i in numbers if i < 0 or (num_results is not None and i >= num_results)]:
            raise ValueError(f"{who}: backward_ignores has {wrong[0]}, which is not the number of a result.")

    def _check_parameters(self, who: str, field: str, names: Iterable[object]) -> None:
        there = ", ".join(self._parameters) or "none, as its reference has no parameters with names"
        for name in names:
            if name not in self._parameters:
                raise ValueError(f"{who}: {field} has {name!r}, which is not a parameter of the op; there are {there}.")

    @property
    def _kernels(self) -> Mapping[str, tuple[Kernel, ...]]:
        return cast(Any, self.kernels)

    @property
    def _backward(self) -> Mapping[str, tuple[Kernel, ...]]:
        return cast(Any, self.backward or {})

    @property
    def _every_kernel(self) -> Iterator[tuple[str, Kernel]]:
        """Each with its platform."""
        return ((platform, kernel) for platform, kernels in self._kernels.items() for kernel in kernels)

    @property
    def _every_function(self) -> Iterator[Callable[..., object]]:
        """Functions that define the op and its kernels. Equal ones are not always the same."""
        backward = (kernel for kernels in self._backward.values() for kernel in kernels)
        for declared in (self, *(kernel for _, kernel in self._every_kernel), *backward):
            values = (getattr(declared, field.name) for field in dataclasses.fields(declared))
            yield from (value for value in values if callable(value))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def __name__(self) -> str:
        """For JAX, which names programs like the functions that they are of."""
        return self.name

    def __call__(self, *args: PyTree, **options: object) -> PyTree:
        leaves, in_tree = tree_flatten(args)
        try:
            arrays, avals = typed(leaves)
        except Exception:  # JAX does not say whose argument it was, and of a view of a Ref it is not a TypeError
            check_typed(self._named(args), f"Op({self.name})")
            raise
        static = Options(options, f"Op({self.name})")
        statics = strict_statics(in_tree)
        call, out_tree = bind_op(self, in_tree, statics, avals, static, settings())
        try:
            return tree_unflatten(out_tree, xla.op_call(call, *arrays))
        except ValueError as error:
            xla.check_devices(error, f"Op({self.name})", self._named(args))
            raise

    def _named(self, args: Sequence[PyTree]) -> Iterator[tuple[str, Any]]:
        """The arrays of a call with their paths."""
        return ((path, leaf) for path, _, leaf in named_operands(self, args))

    def using(self, implementation: Implementation) -> "Op":
        """This op with one implementation alone.

        **Arguments:**

        - `implementation`: `"auto"` is the op itself; `"reference"` is its reference alone; `"native"`, `"python"`, `"c"`,
            `"numba"`, `"tvm_ffi"`, `"jax"`, `"cuda"`, `"image"` or `"triton"` is its kernels of that kind. A call that no
            kernel of that kind supports is an error, which has the reason of each. Gradients are those of `backward` where it
            has a kernel for the platform, of whatever kind, else those of `reference`.

        **Raises:** `ValueError` for another name, or if there is no such kernel.
        """
        return self if implementation == self.implementation else _using(self, implementation)

    def register(self) -> None:
        """Load the libraries of the op's native kernels, and tell XLA their handlers.

        That happens by itself when a program that calls the op is lowered. A program of [`eqxcallback.load`][] was lowered
        elsewhere, and needs it.

        **Raises:** `ValueError` for a library that cannot be loaded, or has no such handler.
        """
        for declared in (self._kernels, self._backward):
            for platform, kernels in declared.items():
                for kernel in kernels:
                    backends.register_library(kernel, platform, self.name, for_each=uses_threads(self.vmap_method))

    @property
    def _parameters(self) -> tuple[str, ...]:
        """The names of the array arguments, as far as a signature tells them."""
        return tuple(self._defaults)

    @functools.cached_property
    def _defaults(self) -> Mapping[str, Any]:
        """The array arguments, and what each one is by default."""
        function = self.reference or next(kernel for _, kernel in self._every_kernel).out_type
        try:
            parameters = inspect.signature(function).parameters.values() if function else ()
        except ValueError:  # some callables written in C have no signature
            return {}
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return {parameter.name: parameter.default for parameter in parameters if parameter.kind in kinds}

    @functools.cached_property
    def _default_options(self) -> Mapping[str, Any]:
        """The options that the reference has a default of."""
        return {name: value for name, value in _defaults_of(self.reference).items() if name not in self._parameters}


def _defaults_of(function: Callable[..., object] | None) -> dict[str, object]:
    """Defaults of parameters, but for functions, by which an implementation shares its code with another one."""
    signature = signature_of(function) if function else None
    parameters = signature.parameters.values() if signature else ()
    defaults = {parameter.name: parameter.default for parameter in parameters}
    return {name: value for name, value in defaults.items() if not callable(value)}  # `empty` is a class


def _candidates(declared: object, field: str, who: str) -> Mapping[str, tuple[Kernel, ...]]:
    """Return the kernels of each platform. The caller's own mapping may change."""
    if not isinstance(declared, Mapping):
        raise TypeError(f"{who}: expected {field} to be a mapping from platforms to kernels; got {declared!r}.")
    candidates = {}
    for platform, kernels in declared.items():
        if platform not in xla.PLATFORMS:
            raise ValueError(f"{who}: expected the keys of {field} to be of {xla.PLATFORMS}; got {platform!r}.")
        candidates[platform] = as_tuple(kernels)
        for kernel in candidates[platform]:
            if not isinstance(kernel, Kernel):
                raise TypeError(
                    f"{who}: expected a kernel for {platform} in {field}; got {kernel!r} of type {type(kernel).__name__}."
                )
    return Frozen(candidates, f"{who}.{field}")


@functools.lru_cache(maxsize=4096)
def _using(op: Op, implementation: Implementation) -> Op:
    return dataclasses.replace(op, implementation=implementation)
