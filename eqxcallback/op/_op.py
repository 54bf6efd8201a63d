"""One mathematical operation, with a kernel for each platform and a definition in pure JAX."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten
from jaxtyping import PyTree

from .. import _aliases, backends, xla
from .._errors import blaming, callable_name
from ..kernel import Kernel, NativeKernel, PythonKernel
from ._axes import Axes
from ._batching import METHODS, MODES
from ._bodies import Backward, Forward
from ._call import Call
from ._choice import Implementation, chosen
from ._definition import Definition, differentiable
from ._options import Options
from ._sharding import parse_sharding
from ._structure import Structure, check_typed, typed


_config: Any = jax.config  # its options are made at run time: no type checker knows them


@dataclasses.dataclass(frozen=True)
class Op:
    """One mathematical operation: its kernels, and its definition in pure JAX.

    !!! example

        ```python
        saxpy = eqxcallback.Op(
            "saxpy",
            kernels={"cpu": eqxcallback.NativeKernel("saxpy", library="libsaxpy.so")},
            reference=lambda x, y, *, a: a * x + y,
            batching={"x": "batched", "y": "batched"},
        )
        z = saxpy(x, y, a=2.0)
        ```

    A call takes arrays, or PyTrees of arrays, by position, and static options by keyword. It works under `jit`, `vmap`, `grad`,
    `jvp`, `scan`, `checkpoint` and `shard_map`.

    **Arguments:**

    - `name`: of the operation, for errors and programs.
    - `kernels`: `{platform: kernel}`, where a platform is `"cpu"`, `"cuda"` or `"rocm"`. On a platform without a kernel the
        reference runs.
    - `reference`: a function of the same arguments and options in pure JAX. It defines the result's type, the operation's
        derivatives, and its value where there is no kernel. Without one there are no derivatives, and each kernel needs
        an `out_type`.
    - `batching`: how `vmap` calls the kernel: `"fold"` or another `vmap_method` of [`eqxcallback.Layer`][]; `"sequential"` is
        once for each example. Or for each parameter, `{name: mode}`:

        - `"batched"`: the kernel sees the mapped axis in front, also of an operand that is not mapped;
        - `"either"`: the kernel sees the mapped axis in front of an operand that is mapped, and nothing in front of others;
        - `"shared"`: the kernel takes no such axis; if this operand is mapped, the kernel is called for each example.

        The arrays of one argument, a PyTree, go together: if one of them is mapped, all have the axis. Axes of nested
        `vmap`s follow each other, the outermost first. An operand that only some of them map has them all, or, if it is
        `"either"`, those from the outermost one that maps it inwards. An operand that a result overwrites is always batched.

    - `backward`: the kernel of the gradients, for all platforms that have one forward or for each. A `PythonKernel` is
        `body(ctx, grads, args, out, cotangents, **options)`, as `backward` of [`eqxcallback.Layer`][] is. Others take
        the flat arguments, results and cotangents, and compute the gradients of all arguments of floating type.
        Without one, gradients are those of `reference`.
    - `sharding`: what may be split between devices under plain `jit`, a name for each dimension of each flat operand and
        result: `"... d, d -> ... d"`. A name that all results have may be split, so that each device calls the kernel on its
        own part; `_` is whole. Axes of `vmap` may always be split. By default nothing else is.
    - `alternatives`: `{platform: kernels}`: more kernels, which run only where `using` chooses them.
    - `falls_back`: whether the reference runs on a platform without a kernel. Else that is an error.
    - `when`: a function of the op's arguments and options, the arrays as `jax.ShapeDtypeStruct`s with the axes of `vmap`s that
        the kernel would see in front: whether it runs. Where it is false, the reference does, and gives the gradients too.
        `using` asks nobody.
    - `backward_reads_results`: whether `backward` reads the results of the op. If not, it gets the cotangents in their place, and
        the results are neither kept for it nor computed for its sake.

    **Raises:** `TypeError` or `ValueError` for a wrong declaration, and when arguments do not fit it.
    """

    name: str
    kernels: Mapping[str, Kernel]
    reference: Callable[..., PyTree] | None = None
    batching: str | Mapping[str, str] = "sequential"
    backward: Kernel | Mapping[str, Kernel] | None = None
    sharding: str | None = None
    alternatives: Mapping[str, Sequence[Kernel]] = dataclasses.field(default_factory=dict)
    falls_back: bool = True
    when: Callable[..., bool] | None = None
    backward_reads_results: bool = True

    def __post_init__(self) -> None:
        who = f"Op({self.name})"
        if not isinstance(self.kernels, Mapping):
            raise TypeError(f"{who}: expected kernels to be a mapping from platforms to kernels; got {self.kernels!r}.")
        object.__setattr__(self, "kernels", dict(self.kernels))  # the caller's own may change
        if not isinstance(self.alternatives, Mapping):
            raise TypeError(
                f"{who}: expected alternatives to be a mapping from platforms to kernels; got {self.alternatives!r}."
            )
        object.__setattr__(self, "alternatives", {name: tuple(each) for name, each in self.alternatives.items()})
        every = [(platform, kernel) for platform in self.alternatives for kernel in self.alternatives[platform]]
        for platform, kernel in [*self.kernels.items(), *every]:
            if platform not in xla.PLATFORMS:
                raise ValueError(f"{who}: expected the keys of kernels to be of {xla.PLATFORMS}; got {platform!r}.")
            if not isinstance(kernel, Kernel):
                raise TypeError(
                    f"{who}: expected a kernel for {platform}; got {kernel!r} of type {type(kernel).__name__}."
                )
            _aliases.check(kernel.aliases, who)
            if self.reference is None and kernel.out_type is None:
                raise ValueError(f"{who}: the kernel for {platform} needs an out_type, because there is no reference.")
        if isinstance(self.backward, Mapping):
            object.__setattr__(self, "backward", dict(self.backward))
        for platform, kernel in self._backward.items():
            if not isinstance(kernel, Kernel) or platform not in self.kernels:
                raise TypeError(
                    f"{who}: expected backward to be a kernel, or kernels for platforms that have one forward; got "
                    f"{kernel!r} for {platform}."
                )
        if self.sharding is not None and not isinstance(self.sharding, str):
            raise TypeError(
                f"{who}: expected sharding to be a rule such as '... d, d -> ... d'; got {self.sharding!r}."
            )
        if self.reference is not None and not callable(self.reference):
            raise TypeError(f"{who}: expected reference to be a function; got {self.reference!r}.")
        try:
            hash(self)
        except TypeError as error:
            raise TypeError(
                f"{who}: expected reference and out_type to be hashable, as functions are; got {self.reference!r} ({error}). "
                "Wrap a Module in a function of its arrays."
            ) from None
        if self.when is not None and (not callable(self.when) or self.reference is None):
            raise TypeError(f"{who}: expected when to be a function, and a reference beside it; got {self.when!r}.")
        if self.reference is None and not self.kernels and not self.alternatives:
            raise ValueError(f"{who}: expected a kernel or a reference; got neither.")
        self._check_batching(who)

    def _check_batching(self, who: str) -> None:
        if isinstance(self.batching, str):
            if self.batching not in METHODS:
                raise ValueError(
                    f"{who}: expected batching to be one of {METHODS}, or a mapping; got {self.batching!r}."
                )
            return
        for name, mode in self.batching.items():
            if mode not in MODES:
                raise ValueError(f"{who}: expected batching[{name!r}] to be one of {MODES}; got {mode!r}.")
            if self._parameters and name not in self._parameters:
                raise ValueError(
                    f"{who}: batching has {name!r}, which is not a parameter of the op; there are "
                    f"{', '.join(self._parameters)}."
                )

    # Two ops with the same fields are one, but mappings have no hash, and those of functions are enough.
    def __hash__(self) -> int:
        kernels = frozenset(self.kernels.items())
        return hash((self.name, self.reference, kernels, self.sharding, self.falls_back))

    def __call__(self, *args: PyTree, **options: Any) -> PyTree:
        leaves, in_tree = tree_flatten(args)
        try:
            arrays, avals = typed(leaves)
        except TypeError:  # JAX does not say whose argument it was
            check_typed(((path, leaf) for path, _, leaf in self._named(args)), f"Op({self.name})")
            raise
        static = Options(options, f"Op({self.name})")
        call, out_tree = self._call(in_tree, avals, static, _config.jax_enable_x64)
        return tree_unflatten(out_tree, xla.op_call(call, *arrays))

    def using(self, implementation: Implementation) -> "Op":
        """This op with one implementation alone.

        **Arguments:**

        - `implementation`: `"auto"` is the op itself; `"reference"` its definition; `"native"`, `"python"`, `"cuda"` or
            `"triton"` its kernels of that kind. On a platform without one, a call of these is an error. Gradients are those
            of `backward` where it has a kernel for the platform, of whatever kind, else those of `reference`.

        **Raises:** `ValueError` for another name, or if there is no such kernel.
        """
        return chosen(self, implementation)

    @functools.cached_property
    def _parameters(self) -> tuple[str, ...]:
        """The names of the array arguments, as far as the definition tells them."""
        definition = self.reference or next(iter(self.kernels.values())).out_type
        try:
            parameters = inspect.signature(definition).parameters.values() if definition else ()
        except ValueError:  # some callables written in C have no signature
            return ()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - ops live as long as their modules
    def _call(self, in_tree: Any, avals: tuple[Any, ...], options: Options, x64: bool) -> tuple[Call, Any]:
        """What is checked and made once for each type of arguments."""
        who = f"Op({self.name})"
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        args = tree_unflatten(in_tree, structs)
        inputs = self._inputs(args)
        out_tree, outputs = self._results(args, options, who)
        trees = Structure.of_arrays(in_tree), Structure.of_arrays(out_tree)

        def implementation(kernel: Kernel, body: Callable[..., Any]) -> backends.Implementation:
            aliases = _aliases.resolve(_aliases.check(kernel.aliases, who), inputs, outputs, who)
            if isinstance(kernel, PythonKernel):
                _check_body(kernel.body, ("ctx", "out", *args), options, who)
                return backends.Implementation(kernel, aliases, body=body(kernel.body, *trees, options))
            if isinstance(kernel, NativeKernel):
                return backends.Implementation(kernel, aliases, self._attributes(kernel, options))

            def arguments(types: Sequence[Any], _: Sequence[Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
                return tree_unflatten(in_tree, types), options.values

            names = tuple(leaf.path for leaf in (*inputs, *outputs))
            return backends.Implementation(kernel, aliases, options.values, arguments=arguments, names=names)

        def backward(platform: str, asked: tuple[int, ...]) -> backends.Implementation | None:
            kernel = self._backward.get(platform)
            if kernel is None:
                return None
            if isinstance(kernel, PythonKernel):
                _check_body(kernel.body, ("ctx", "grads", "args", "out", "cotangents"), options, who)
                body = Backward(kernel.body, *trees, options, trees[1], asked)
                return backends.Implementation(kernel, body=body)
            if isinstance(kernel, NativeKernel):
                return backends.Implementation(kernel, options=self._attributes(kernel, options, asked=asked))

            computed = differentiable(avals)
            body = Backward(_nothing, *trees, options, trees[1], computed)

            def arguments(types: Sequence[Any], results: Sequence[Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
                return body.trees(results, types), options.values

            names = tuple(leaf.path for leaf in (*inputs, *outputs))
            names += tuple(f"the cotangent of {leaf.path}" for leaf in outputs)
            names += tuple(f"the gradient of {inputs[i].path}" for i in computed)
            return backends.Implementation(kernel, options=options.values, arguments=arguments, names=names)

        def reference(*args: Any) -> Sequence[Any]:
            assert self.reference is not None
            return tree_leaves(self.reference(*tree_unflatten(in_tree, args), **options.values))

        def when(types: Sequence[Any]) -> bool:
            assert self.when is not None
            return bool(self.when(*tree_unflatten(in_tree, types), **options.values))

        definition = Definition(
            key=(self, in_tree, avals, options, x64),
            name=self.name,
            who=who,
            remedy="Give the Op a reference, or a kernel.",
            falls_back=self.falls_back,
            label=f"({options!r})" if options.values else "",
            names=tuple(str(leaf.root) for leaf in inputs),
            input_avals=tuple(xla.result_aval(aval.shape, aval.dtype) for aval in avals),
            result_avals=tuple(xla.result_aval(leaf.shape, leaf.dtype) for leaf in outputs),
            forward={platform: implementation(kernel, Forward) for platform, kernel in self.kernels.items()},
            backward=backward if self._backward else None,
            sharding=None if self.sharding is None else parse_sharding(self.sharding, avals, outputs, who),
            reference=None if self.reference is None else reference,
            reads_results=self.backward_reads_results,
            batching=self.batching,
            when=None if self.when is None else when,
        )
        return Call(definition, Axes.none(len(avals))), out_tree

    @property
    def _backward(self) -> Mapping[str, Kernel]:
        if self.backward is None or isinstance(self.backward, Mapping):
            return self.backward or {}
        return dict.fromkeys(self.kernels, self.backward)

    def _attributes(self, kernel: NativeKernel, options: Options, **others: Any) -> Mapping[str, Any]:
        """The options that the kernel takes, and those of `others` that it names."""
        if kernel.attributes is None:
            return options.values
        known = {**others, **options.values}
        missing = [name for name in kernel.attributes if name not in known]
        if missing:
            raise TypeError(
                f"Op({self.name}): the kernel {kernel.symbol} takes the option {missing[0]}; none was given."
            )
        return {name: known[name] for name in kernel.attributes}

    def _results(self, args: Any, options: Options, who: str) -> tuple[Any, list[_aliases.Leaf]]:
        """The tree and the leaves of the results, on which all who define them agree."""
        types = {}
        if self.reference is not None:
            with _calling(self.reference, "reference", args, options, who):
                types["the reference"] = jax.eval_shape(functools.partial(self.reference, **options.values), *args)
        for platform, kernel in self.kernels.items():
            if kernel.out_type is not None:
                with _calling(kernel.out_type, f"out_type for {platform}", args, options, who):
                    types[f"the out_type for {platform}"] = kernel.out_type(*args, **options.values)
        leaves = {name: _results(tree, f"{who}: {name}") for name, tree in types.items()}
        (first, expected), *rest = leaves.items()
        for name, got in rest:
            if [(leaf.shape, leaf.dtype) for leaf in got] != [(leaf.shape, leaf.dtype) for leaf in expected]:
                raise ValueError(
                    f"{who}: expected one type of results from all; {first} has {_text(expected)}, and {name} has {_text(got)}."
                )
        return jax.tree.structure(types[first]), expected

    def _inputs(self, args: Sequence[Any]) -> list[_aliases.Leaf]:
        return [_aliases.Leaf(path, root, leaf.shape, leaf.dtype) for path, root, leaf in self._named(args)]

    def _named(self, args: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
        """The path of each flat operand, the parameter that it belongs to, and itself."""
        for i, arg in enumerate(args):
            root = self._parameters[i] if i < len(self._parameters) else f"args[{i}]"
            for path, leaf in tree_flatten_with_path(arg)[0]:
                yield _aliases.path_text(root, path), root, leaf


def _nothing(*_: Any) -> None:
    """In place of a body in Python."""


@contextlib.contextmanager
def _calling(
    function: Callable[..., Any], what: str, args: Sequence[Any], options: Options, who: str
) -> Iterator[None]:
    """Where `function`, which defines an op, is called: arguments that it does not take are a wrong call of the op."""
    try:
        with blaming(who, what, args, options.values):
            yield
    except TypeError as error:
        problem = _problem(function, args, options)
        if problem is None:
            raise
        raise TypeError(f"{who}: {problem}.") from error


def _check_body(body: Callable[..., Any], args: Sequence[Any], options: Options, who: str) -> None:
    """Now, for the kernel runs when it is too late for the caller."""
    problem = _problem(body, args, options)
    if problem is not None:
        raise TypeError(f"{who}: expected its kernel {callable_name(body)} to take what it is called with; {problem}.")


def _problem(function: Callable[..., Any], args: Sequence[Any], options: Options) -> str | None:
    """Why `function` does not take these arguments, or `None`."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # of what is called, not of what it wraps
    except (TypeError, ValueError):  # some callables written in C have none
        return None
    try:
        signature.bind(*args, **options.values)
    except TypeError as error:
        return f"{error}; its arguments are {signature.replace(return_annotation=inspect.Signature.empty)}"
    return None


def _results(tree: PyTree, who: str) -> list[_aliases.Leaf]:
    leaves = []
    for path, leaf in tree_flatten_with_path(tree)[0]:
        text = _aliases.path_text("result", path)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{who} has {text} = {leaf!r} of type {type(leaf).__name__}; expected `shape` and `dtype`, as of a "
                "jax.ShapeDtypeStruct."
            )
        leaves.append(_aliases.Leaf(text, _aliases.root_name(path), tuple(leaf.shape), leaf.dtype))
    return leaves


def _text(leaves: Sequence[_aliases.Leaf]) -> str:
    return ", ".join(map(str, leaves)) or "none"
