"""A training step of any model: AdamW, with weights in f32, or in bf16 with masters in f32."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..parallel.data_parallel import replicate, split_rows


# Of GPT-2's kind of training; the matrices decay, biases and norms do not.
_B2, _WEIGHT_DECAY, _LARGEST_NORM = 0.95, 0.1, 1.0


class State(NamedTuple):
    """All that training changes: the weights in f32, and the optimizer's state. The step's number is in there too."""

    weights: Any
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one step, as XLA plans them."""

    temporary: int
    """Beside the state and the batch, gradients included."""
    total: int


def make_optimizer(*, rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW behind a clipped norm. The rate rises for a tenth of the steps, a hundred at most, and falls to a tenth of itself.

    **Arguments:**

    - `rate`: the highest learning rate.
    - `steps`: of the whole training.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(100, steps // 10), max(steps, 1), rate / 10)
    return optax.chain(
        optax.stateless(_clip),
        optax.adamw(schedule, b2=_B2, weight_decay=_WEIGHT_DECAY, mask=_is_matrix),
    )


def _clip(gradients: Any, weights: Any = None) -> Any:
    """Do as `optax.clip_by_global_norm` does, by one factor. XLA does not compute its quotients where they are used, twice, but
    keeps them: all gradients would be in memory a second time.
    """
    factor = _LARGEST_NORM / jnp.maximum(optax.tree.norm(gradients), _LARGEST_NORM)
    return jax.tree.map(lambda gradient: gradient * factor, gradients)


def _is_matrix(weights: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, weights)


class Trainer:
    """The steps of one model."""

    def __init__(
        self,
        model: Any,
        loss: Callable[[Any, Any], jax.Array],
        optimizer: optax.GradientTransformation,
        *,
        dtype: Any,
        mesh: jax.sharding.Mesh | None = None,
        accumulate: int = 1,
    ):
        """**Arguments:**

        - `model`: with weights in f32. They are not kept.
        - `loss`: a function of a model and a batch.
        - `dtype`: of the weights that the loss sees. The optimizer's are f32.
        - `mesh`: of several devices, of `models.parallel.tensor_parallel.mesh_of`. Each has the state, and some rows of a batch.
        - `accumulate`: into how many parts a step splits its batch. One part is in memory at a time, and the step takes the mean
            of their gradients. The loss has to be a mean over rows, whose number is a multiple of the parts and devices.
        """
        self._mesh, self._accumulate = mesh, accumulate
        self._static = eqx.partition(model, eqx.is_inexact_array)[1]
        self._dtype, self._loss, self._optimizer = dtype, loss, optimizer
        self._compiled: Any = None
        self.structure: State = eqx.filter_eval_shape(self.begin, model)
        """A state without its arrays."""

    def compile(self, batch: Any) -> Memory | None:
        """Compile the step for batches like this one.

        **Returns:** what a step needs, or None where XLA does not say.
        """
        mesh, structure = self._mesh, self.structure
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        if mesh is not None:
            structure = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), structure)
        program = jax.jit(self._next, donate_argnums=0, out_shardings=everywhere)
        self._compiled = program.lower(structure, self._split(batch)).compile()
        plan = self._compiled.memory_analysis()
        if plan is None:
            return None
        operands = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
        return Memory(plan.temp_size_in_bytes, operands + plan.temp_size_in_bytes)

    def begin(self, model: Any) -> State:
        """Return the state before the first step, on one device."""
        weights = jax.tree.map(jnp.copy, eqx.filter(model, eqx.is_inexact_array))  # the first step uses them up
        return State(weights, self._optimizer.init(weights))

    def place(self, state: State) -> State:
        """Return the state on all devices."""
        return state if self._mesh is None else replicate(state, self._mesh)

    def step(self, state: State, batch: Any) -> tuple[State, float]:
        """Take a step, which is compiled now if `compile` was not called. The memory of `state`, which is on all devices, is that
        of the next state.

        **Returns:** the next state, and the loss before it, which is NaN as well if the gradients have no finite norm: then the
        next state is of no use.
        """
        if self._compiled is None:
            self.compile(batch)
        state, loss = self._compiled(state, self._split(batch))  # pyright: ignore[reportOptionalCall]: `compile` sets it
        return state, float(loss)

    def model(self, state: State, *, copy: bool = True) -> Any:
        """Return the model as the loss sees it, on one device.

        **Arguments:**

        - `copy`: False saves memory for who needs the model only until the next step, which takes the memory of f32 weights.
        """
        weights = jax.tree.map(lambda x: x.addressable_data(0), state.weights)
        return eqx.combine(jax.tree.map(lambda x: jnp.array(x, self._dtype, copy=copy), weights), self._static)

    def _split(self, batch: Any) -> Any:
        return batch if self._mesh is None else split_rows(batch, self._mesh)

    def _next(self, state: State, batch: Any) -> tuple[State, jax.Array]:
        loss, gradients = self._loss_and_gradients(_cast(state.weights, self._dtype), batch)
        with jax.numpy_dtype_promotion("standard"):  # which Optax counts on
            # The optimizer of `make_optimizer` has the same norm: XLA computes it once.
            loss = jnp.where(jnp.isfinite(optax.tree.norm(gradients)), loss, jnp.nan)
            updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.weights)
        return State(optax.apply_updates(state.weights, updates), optimizer), loss

    def _loss_and_gradients(self, weights: Any, batch: Any) -> tuple[jax.Array, Any]:
        """Return the mean over the parts of a batch, the gradients in f32."""

        def of_part(part: Any) -> tuple[jax.Array, Any]:
            loss = lambda weights: self._loss(eqx.combine(weights, self._static), part)
            value, gradients = jax.value_and_grad(loss)(weights)
            return value, _cast(gradients, jnp.float32)

        if self._accumulate == 1:
            return of_part(batch)
        parts = jax.tree.map(self._parts, batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_part, _first(parts)))
        # A loop: of a program with one part after the other, XLA might have more than one in memory.
        add = lambda sums, part: (jax.tree.map(jnp.add, sums, of_part(part)), None)
        sums, _ = jax.lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x / self._accumulate, sums)

    def _parts(self, x: jax.Array) -> jax.Array:
        """Split the rows of an array. A part has rows of each device, as their rows are neighbours."""
        if self._accumulate < 1 or len(x) % self._accumulate:
            raise ValueError(
                f"Trainer: expected accumulate to divide the {len(x)} rows of a batch; got {self._accumulate}. "
                "Pass another accumulate, or other batches."
            )
        return x.reshape(-1, self._accumulate, *x.shape[1:]).swapaxes(0, 1)


def _first(parts: Any) -> Any:
    return jax.tree.map(lambda x: x[0], parts)


def _cast(weights: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), weights)
