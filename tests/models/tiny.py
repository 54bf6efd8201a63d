"""A file with a model of two small blocks, with random weights."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize


def write_tiny(path, encodings=(), other="F32", context=64, width=64):
    """`width`: of the residual stream, a multiple of 256 for encodings whose blocks have as many weights."""
    encodings = dict(encodings)
    hidden = 96 if width == 64 else width
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // 4)
    writer.add_vocab_size(64)

    def add(name, *shape):
        kind = encodings.get(name.split(".")[-2], other)
        if kind is None:
            return
        values = rng.normal(scale=0.2, size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
        elif kind in ("F32", "F16"):
            writer.add_tensor(name, values.astype({"F32": np.float32, "F16": np.float16}[kind]))
        elif kind.endswith("_K"):
            writer.add_tensor(name, random_blocks(rng, kind, *shape), raw_dtype=GGMLQuantizationType[kind])
        else:
            kind = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", 64, width)
    add("output.weight", 64, width)
    add("output_norm.weight", width)
    for i in range(2):
        for name, shape in (
            ("attn_norm", (width,)),
            ("attn_q", (width, width)),
            ("attn_k", (width // 2, width)),
            ("attn_v", (width // 2, width)),
            ("attn_output", (width, width)),
            ("ffn_norm", (width,)),
            ("ffn_gate", (hidden, width)),
            ("ffn_up", (hidden, width)),
            ("ffn_down", (width, hidden)),
        ):
            add(f"blk.{i}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(rng, kind, out_features, in_features):
    """Blocks that no package can make: any bytes, but for the halves that multiply their scales."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (out_features, in_features // weights, size), np.uint8)
    at, halves = (208, 1) if kind == "Q6_K" else (0, 2)
    scales = rng.uniform(0.5, 1, (*blocks.shape[:2], halves)).astype(np.float16) / np.float16(4096)
    blocks[..., at : at + 2 * halves] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2 * halves)
    return blocks.reshape(out_features, -1)
