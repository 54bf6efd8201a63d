"""The tensors of a Llama as its files have them: what `models.llama.load` makes its layers of."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

import eqxcallback as eqxc

from .gguf_writer import ENCODING_OF_DTYPE, Encoded
from .llama import Llama, Projection


def tensors(model: Llama, *, rotates_neighbours: bool) -> dict[str, Encoded]:
    """All tensors of a model, bit by bit those that its layers have.

    **Arguments:**

    - `model`: without adapters, or with merged ones.
    - `rotates_neighbours`: of the `models._files.Files` that are written.

    **Returns:** the tensors by their names in GGUF files, those with one axis in f32.
    """
    config = model.config
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if rotates_neighbours else {}
    out = dict(_projection(Projection([model.embedding.table]), {"token_embd": config.vocab_size}))
    for index, block in enumerate(model.blocks):
        parts: list[tuple[str, Encoded]] = [
            ("attn_norm.weight", _vector(block.attention_norm.weight)),
            *_projection(block.qkv, {"attn_q": queries, "attn_k": keys, "attn_v": keys}, heads),
            *_projection(block.attention_out, {"attn_output": config.embedding_size}),
            ("ffn_norm.weight", _vector(block.feed_forward_norm.weight)),
            *_projection(block.gate_up, {"ffn_gate": config.hidden_size, "ffn_up": config.hidden_size}),
            *_projection(block.down, {"ffn_down": config.embedding_size}),
        ]
        if block.head_norm is not None:
            of_queries, of_keys = np.split(np.asarray(block.head_norm.weight), [config.num_heads])
            parts += [("attn_q_norm.weight", _of_heads(of_queries)), ("attn_k_norm.weight", _of_heads(of_keys))]
        out |= {f"blk.{index}.{name}": tensor for name, tensor in parts}
    out["output_norm.weight"] = _vector(model.norm.weight)
    if model.output is not None:
        out |= _projection(model.output, {"output": config.vocab_size})
    return out


def _projection(
    projection: Projection, sizes: Mapping[str, int], heads: Mapping[str, int] | None = None
) -> Iterator[tuple[str, Encoded]]:
    """The weights and biases of layers that lie side by side.

    **Arguments:**

    - `sizes`: the `out_features` of each by its name.
    - `heads`: of those whose rows the file has in pairs.
    """
    if projection.adapter is not None or projection.sum_over is not None:
        raise ValueError(
            "tensors: expected a model on one device, without adapters that are not merged; got another. "
            "Call models.lora.merge."
        )
    weights, biases = _rows(projection.layers)
    first, layers = 0, iter(weights)
    encoding, rows = next(layers)
    for name, size in sizes.items():
        if first == len(rows):
            first, (encoding, rows) = 0, next(layers)
        part = slice(first, first + size)
        count = (heads or {}).get(name)
        yield f"{name}.weight", Encoded(encoding, _ordered(rows[part], count))
        first += size
    if biases is not None:
        ends = np.cumsum([*sizes.values()])[:-1]
        for name, bias in zip(sizes, np.split(biases, ends), strict=True):
            yield f"{name}.bias", _vector(_ordered(bias, (heads or {}).get(name)))


def _rows(
    layers: Sequence[eqxc.nn.QuantizedLinear | eqxc.nn.Linear],
) -> tuple[list[tuple[str, np.ndarray]], np.ndarray | None]:
    """The encoding and the rows of each layer, and all biases."""
    weights = []
    for layer in layers:
        if isinstance(layer, eqxc.nn.QuantizedLinear):
            layer = layer.unpacked()
            weights.append((layer.encoding, np.asarray(layer.blocks)))
        else:
            weights.append((ENCODING_OF_DTYPE[layer.weight.dtype.name], np.asarray(layer.weight)))
    biases = [np.asarray(layer.bias) for layer in layers if layer.bias is not None]  # all layers have one, or none
    return weights, np.concatenate(biases) if biases else None


def _ordered(rows: np.ndarray, heads: int | None) -> np.ndarray:
    """Rows as the file has them. `heads`: of a tensor whose rows are in pairs there, and halves of a head here."""
    if heads is None:
        return rows
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _vector(x: object) -> Encoded:
    return Encoded("F32", np.asarray(x).astype(np.float32))


def _of_heads(weights: np.ndarray) -> Encoded:
    """The norm of all heads, which files have once."""
    if not np.array_equal(weights, np.broadcast_to(weights[:1], weights.shape), equal_nan=weights.dtype.kind == "f"):
        raise ValueError("tensors: expected one norm for all heads of queries, and of keys; got several.")
    return _vector(weights[0])
