"""The subject of a check, be it a layer, an op or another function, as functions of flat arrays."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_structure, tree_unflatten

from .. import xla
from ..core import DType, PyTree, Value
from ..kernel import Emulated, JaxKernel, Kernel, PythonKernel, as_tuple
from ..layer import Layer
from ..layer._declarations import overrides_kernels
from ..transform import Op, is_array
from ._findings import NotApplicable
from ._operand import Operand, normal, on_device


Function = Callable[..., Sequence[Value]]

_config: Any = jax.config  # its options are made at run time: no type checker knows them


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """**Attributes:**

    - `operands`: the arrays of the subject itself, then those of the arguments.
    - `call`, `reference`: from flat arrays to flat arrays.
    - `call_tree`, `reference_tree`: from flat arrays to what the user's function returns.
    - `is_known`: whether it is a layer or an op, and tells its kernels.
    - `kernel`: on this platform, if there is one.
    - `aliases`: whether results overwrite operands.
    - `functions`: Python functions by which its programs find it, and that another process has to import.
    """

    name: str
    operands: tuple[Operand, ...]
    call_tree: Callable[..., Any]
    reference_tree: Callable[..., Any] | None
    is_known: bool
    kernel: Any
    aliases: bool
    has_reverse: bool
    has_forward: bool
    functions: tuple[Any, ...]
    seed: int

    @functools.cached_property
    def call(self) -> Function:
        return flat(self.call_tree)

    @functools.cached_property
    def reference(self) -> Function | None:
        return None if self.reference_tree is None else flat(self.reference_tree)

    @functools.cached_property
    def jitted(self) -> Function:
        return jax.jit(self.call)

    @functools.cached_property
    def jitted_reference(self) -> Function:
        assert self.reference is not None
        return quickly_compiled(self.reference)

    @property
    def references(self) -> list[tuple[str, Function]]:
        """The programs, and their names, that a transformed call is compared with, example by example."""
        programs = [("the calls one by one", self.jitted)]
        return programs if self.reference is None else [*programs, ("the reference", self.jitted_reference)]

    @property
    def pullbacks(self) -> list[tuple[str, Function]]:
        programs = [("the gradients one by one", self.pullback)]
        return programs if self.reference is None else [*programs, ("those of the reference", self.reference_pullback)]

    @functools.cached_property
    def pullback(self) -> Function:
        """The pullback of all inexact operands: `(operands, cotangents) -> gradients`."""
        return jax.jit(functools.partial(pullback, self.call, self.differentiable))

    @functools.cached_property
    def mapped_pullback(self) -> Function:
        return jax.jit(jax.vmap(functools.partial(pullback, self.call, self.differentiable)))

    @functools.cached_property
    def reference_pullback(self) -> Function:
        assert self.reference is not None
        return quickly_compiled(functools.partial(pullback, self.reference, self.differentiable))

    def arrays(self, number: int = 0) -> list[jax.Array]:
        """New arrays of the example, or of another one. New ones for each call: a wrong kernel may write to them."""
        return [operand.array(operand.example(number)) for operand in self.operands]

    @functools.cached_property
    def differentiable(self) -> tuple[int, ...]:
        return tuple(i for i, operand in enumerate(self.operands) if operand.is_differentiable)

    @functools.cached_property
    def result_types(self) -> Sequence[jax.ShapeDtypeStruct]:
        return jax.eval_shape(self.call, *self.arrays())

    def cotangents(self, number: int = 0, lead: Sequence[int] = ()) -> list[jax.Array]:
        """Random ones, for the results of floating type."""
        rng = np.random.default_rng((self.seed, number))
        return [
            on_device(normal(rng, (*lead, *result.shape), result.dtype))
            for result in self.result_types
            if is_inexact(result)
        ]

    def directions(self, number: int = 0) -> list[np.ndarray]:
        """Random ones, for the operands that are differentiable."""
        rng = np.random.default_rng((self.seed, number, 1))
        return [self.operands[i].direction(rng) for i in self.differentiable]

    @property
    def batched(self) -> list[tuple[str, list[bool]]]:
        """Return the ways to map a usual program: which operands have a batch, and which are shared."""
        are_own = [operand.is_own for operand in self.operands]
        roots = [operand.root for operand in self.operands]
        arguments = list(dict.fromkeys(root for root, mine in zip(roots, are_own, strict=True) if not mine))
        if not arguments:
            return [("all mapped", [True] * len(are_own))]
        cases = [("arguments mapped", [not mine for mine in are_own])]
        if len(arguments) > 1:
            cases.append((f"{arguments[0]} mapped", [root == arguments[0] for root in roots]))
        return cases

    def cast(self, dtype: DType) -> "Subject":
        """The same functions, of operands in another dtype: JAX compiles each once for a dtype, however often it is cast to."""
        other = dataclasses.replace(self, operands=tuple(operand.cast(dtype) for operand in self.operands))
        names = ("jitted", "pullback") + (() if self.reference is None else ("jitted_reference", "reference_pullback"))
        vars(other).update({name: getattr(self, name) for name in names})
        return other

    def need_reverse(self) -> None:
        self._need_floats()
        if not self.has_reverse:
            raise NotApplicable("no derivative: there is neither a reference nor a backward kernel")

    def need_forward(self) -> None:
        self._need_floats()
        if not self.has_forward:
            raise NotApplicable("no forward mode: there is neither a reference nor a jvp")

    def _need_floats(self) -> None:
        if not self.differentiable or not any(map(is_inexact, self.result_types)):
            raise NotApplicable("integers only")


def quickly_compiled(function: Callable[..., object]) -> Callable[..., Any]:
    """Compile a reference quickly: it runs a few times, on small arrays. The subject itself is compiled as users do it."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def is_inexact(leaf: Value) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def pullback(
    function: Function, indices: Sequence[int], operands: Sequence[Value], cotangents: Sequence[Value]
) -> Sequence[Value]:
    """The gradients of the operands `indices`, from cotangents of the inexact results."""
    return jax.vjp(of_some(function, indices, operands), *(operands[i] for i in indices))[1](list(cotangents))


def pushforward(
    function: Function, indices: Sequence[int], operands: Sequence[Value], tangents: Sequence[Value]
) -> tuple[Sequence[Value], Sequence[Value]]:
    """The inexact results, and their tangents."""
    return jax.jvp(of_some(function, indices, operands), [operands[i] for i in indices], list(tangents))


def of_some(function: Function, indices: Sequence[int], operands: Sequence[Value]) -> Function:
    def inexact_results(*values: Value) -> Sequence[Value]:
        merged = list(operands)
        for i, value in zip(indices, values, strict=True):
            merged[i] = value
        return [out for out in function(*merged) if is_inexact(out)]

    return inexact_results


def flat(function: Callable[..., object]) -> Function:
    return lambda *arrays: [leaf for leaf in tree_leaves(function(*arrays)) if is_array(leaf)]


def subject(
    target: Any, args: Sequence[Value], kwargs: Mapping[str, object], reference: Callable[..., object] | None, seed: int
) -> Subject:
    if not callable(target):
        raise TypeError(
            f"testing.check: expected a layer, an op or a function; got {target!r} of type {type(target).__name__}."
        )
    if isinstance(target, type):
        raise TypeError(f"testing.check: expected a layer, not its class; got {target.__qualname__}. Make an instance.")
    static: dict[str, Any] = {}
    if isinstance(target, Op):
        args = tree_map(jnp.asarray, tuple(args))  # all that is not an option is an operand
        static, kwargs = dict(kwargs), {}
    module = None if isinstance(target, Op) or not tree_leaves(target) else target
    tree = (module, tuple(args), dict(kwargs))
    paths, treedef = tree_flatten_with_path(tree)
    leaves: list[Any] = [leaf for _, leaf in paths]
    indices = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    operands = tuple(Operand.of(*_names(paths[i][0]), leaves[i], paths[i][0][0].idx == 0) for i in indices)

    def over(method: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
        """A function of a layer and its arguments, as one of flat arrays."""

        def of_arrays(*arrays: Value) -> Any:
            given = list(leaves)
            for i, array in zip(indices, arrays, strict=True):
                given[i] = array
            owner, positional, named = tree_unflatten(treedef, given)
            return method(target if module is None else owner)(*positional, **named, **static)

        return of_arrays

    has_reference = reference is not None or getattr(target, "reference", None) is not None
    reference_tree = None
    if reference is not None:
        reference_tree = over(lambda _: reference)
    elif has_reference:
        reference_tree = over(lambda layer: layer.reference)
    kernels = kernels_of(target)
    kernel = kernels.get(xla.platform_in_use(()))
    is_known = isinstance(target, Layer | Op)
    backward, own_jvp = (getattr(target, name, None) is not None for name in ("backward", "jvp"))
    return Subject(
        name=_title(target, operands),
        operands=operands,
        call_tree=over(lambda layer: layer),
        reference_tree=reference_tree,
        is_known=is_known,
        kernel=kernel,
        aliases=_aliases(target, kernel),
        has_reverse=not is_known or has_reference or backward or own_jvp,
        has_forward=not is_known or has_reference or own_jvp,
        functions=_functions(target, kernels),
        seed=seed,
    )


def _names(path: Sequence[Any]) -> tuple[str, str]:
    """Return the name of an operand, and of the argument that it belongs to."""
    owner, *inner = path
    if owner.idx == 0:
        return f"self{keystr(tuple(inner))}", "self"
    argument, *rest = inner
    root = f"args{keystr((argument,))}" if owner.idx == 1 else str(argument.key)
    return f"{root}{keystr(tuple(rest))}", root


def _title(target: Any, operands: Sequence[Operand]) -> str:
    name = (
        f"Op({target.name})" if isinstance(target, Op) else getattr(target, "__qualname__", type(target).__qualname__)
    )
    types = [f"{operand.name}: {operand.value.dtype}{list(operand.value.shape)}" for operand in operands]
    return f"{name} of {', '.join(types) or 'no arrays'}"


def kernels_of(target: Any) -> Mapping[str, Any]:
    """`{platform: kernel or function}`, the first choice of each platform."""
    if not isinstance(target, Layer | Op):
        return {}
    if isinstance(target, Layer) and (target.kernels is None or overrides_kernels(type(target))):
        kernel = getattr(type(target), "kernel", None)
        return {} if kernel is None else {"cpu": kernel, "cuda": kernel}
    chosen = getattr(target, "implementation", "auto") if isinstance(target, Op) else "auto"
    by_platform = {}
    for platform, kernels in (target.kernels or {}).items():
        every = [
            getattr(type(target), candidate) if isinstance(candidate, str) else candidate
            for candidate in as_tuple(kernels)
        ]
        for kernel in reversed(every):
            if _may_run(kernel, chosen):
                by_platform[platform] = kernel
    return by_platform


def _may_run(kernel: Any, implementation: str) -> bool:
    if implementation == "auto":
        return not getattr(kernel, "only_if_chosen", False)
    return kernel.backend == implementation


def _aliases(target: Any, kernel: Any) -> bool:
    return bool(getattr(target, "input_output_aliases", None)) or bool(getattr(kernel, "aliases", None))


def _functions(target: Any, kernels: Mapping[str, object]) -> tuple[Any, ...]:
    # What JAX code is, a saved program has.
    python = [kernel for kernel in kernels.values() if not is_native(kernel) and not isinstance(kernel, JaxKernel)]
    bodies = [getattr(kernel, "body", kernel) for kernel in python]
    return (type(target), *bodies) if isinstance(target, Layer) and bodies else tuple(bodies)


def is_native(kernel: Any) -> bool:
    return isinstance(kernel, Kernel) and not isinstance(kernel, PythonKernel | JaxKernel | Emulated)


def is_x64() -> bool:
    """True if this thread computes in 64 bits."""
    return _config.jax_enable_x64


def structure_text(tree: PyTree) -> str:
    return str(tree_structure(tree_map(lambda _: 0, tree)))
