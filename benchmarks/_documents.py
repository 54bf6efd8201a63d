"""Attention of documents that are one sequence, as packed batches have them."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops

from . import _attention_peers as peers, shapes
from ._contestants import Pass, normal, of_pass, operands, torch, torch_call
from ._rows import BEST, OURS, Goal, Row, Setting
from ._timing import Runner, waited_for


# As the documents of a corpus are: many short ones and a few long ones.
LENGTHS, TINY = (512, 96, 300, 160, 704, 76, 120, 80), (7, 2, 11)
_HEADS = shapes.GPT2.attention(1)


def rows(setting: Setting, work: dict[Pass, float]) -> Iterator[Row]:
    """Both passes in f32. `work`: of a pass, in that of a forward one."""
    lengths = TINY if setting.tiny else LENGTHS
    flops = sum(_HEADS._replace(length=length).flops for length in lengths)
    for which in ("forward",) if setting.quick else ("forward", "forward + backward"):
        case = f"{which}, float32, {len(lengths)} documents: {_HEADS._replace(length=sum(lengths))}"
        race = setting.race(_contestants(setting, lengths, which))
        yield Row(case, "GFLOP/s", work[which] * flops, race, (Goal(BEST),), tolerance=1e-4)


def _contestants(setting: Setting, lengths: tuple[int, ...], which: Pass) -> dict[str, Callable[[], Runner]]:
    """Each peer with a mask, and one document after the other, as the lengths are known."""
    shape = _HEADS._replace(length=sum(lengths))
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    seen = jnp.asarray(np.tril(ids[0, :, None] == ids[0, None, :]))
    ends = list(itertools.accumulate(lengths))
    parts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ops.attention(q, k, v, causal=True, segment_ids=ids)

    def one_by_one(attend: Callable[..., Any], join: Callable[..., Any], *qkv: Any) -> Any:
        return join([attend(*(x[:, part] for x in qkv)) for part in parts])

    join = functools.partial(jnp.concatenate, axis=1)
    fs: dict[str, Callable[..., jax.Array]] = {
        OURS: ours,
        "XLA: one by one": functools.partial(one_by_one, functools.partial(peers.heads_first, True), join),
        "jax.nn: with a mask": functools.partial(jax.nn.dot_product_attention, mask=seen),
        "jax.nn: one by one": functools.partial(
            one_by_one, functools.partial(jax.nn.dot_product_attention, is_causal=True), join
        ),
        "Equinox": functools.partial(peers.equinox, seen),
    }
    given = operands(ours, which, [normal(i, *of_operand) for i, of_operand in enumerate(shape.operand_shapes)])
    made: dict[str, Callable[[], Runner]] = {
        name: functools.partial(setting.clock.runner, of_pass(f, which, (0, 1, 2)), *given) for name, f in fs.items()
    }

    def of_torch(with_mask: bool) -> Runner:
        options = {"attn_mask": torch().from_numpy(np.array(seen))} if with_mask else {"is_causal": True}
        f = functools.partial(peers.of_torch, options)
        if not with_mask:
            f = functools.partial(one_by_one, f, functools.partial(torch().cat, dim=1))
        return waited_for(torch_call(f, which, (0, 1, 2), given))

    if setting.torch:
        made |= {
            "torch: with a mask": functools.partial(of_torch, True),
            "torch: one by one": functools.partial(of_torch, False),
        }
    return made
