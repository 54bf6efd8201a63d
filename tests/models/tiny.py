"""A file with a model of two small blocks, with random weights."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel


def write_tiny(
    path,
    encodings=(),
    other="F32",
    context=64,
    hidden=None,
    heads=4,
    kv_heads=2,
    width=64,
    speaks=False,
    merges=("t h",),
):
    """**Arguments:**

    - `width`: of the residual stream, a multiple of 256 for encodings whose blocks have as many weights.
    - `hidden`: the number of features inside the feed-forward layers; by default `width`, or 96 if that is 64.
    - `speaks`: whether it has a tokenizer, of bytes and `merges`. Such a model never ends a text.
    - `merges`: pairs of bytes that are one token.
    """
    encodings = dict(encodings)
    vocab_size, head_size = 64, width // 4
    hidden = hidden or (96 if width == 64 else width)
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_size)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_size)
    if speaks:
        vocab_size = _add_tokenizer(writer, merges)
    writer.add_vocab_size(vocab_size)

    def add(name, *shape):
        kind = encodings.get(name.split(".")[-2], other)
        if kind is None:
            return
        values = rng.normal(scale=0.2, size=shape).astype(np.float32)
        if speaks and name == "output.weight":
            values[0] = 0
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
        elif kind in ("F32", "F16"):
            writer.add_tensor(name, values.astype({"F32": np.float32, "F16": np.float16}[kind]))
        elif kind.endswith("_K"):
            writer.add_tensor(name, random_blocks(rng, kind, *shape), raw_dtype=GGMLQuantizationType[kind])
        else:
            kind = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", vocab_size, width)
    add("output.weight", vocab_size, width)
    add("output_norm.weight", width)
    for i in range(2):
        for name, shape in (
            ("attn_norm", (width,)),
            ("attn_q", (head_size * heads, width)),
            ("attn_k", (head_size * kv_heads, width)),
            ("attn_v", (head_size * kv_heads, width)),
            ("attn_output", (width, head_size * heads)),
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


def _add_tokenizer(writer, merges):
    tokens = ["<|im_end|>", *sorted(ByteLevel.alphabet()), *(pair.replace(" ", "") for pair in merges)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] + [TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}")
    return len(tokens)


def random_blocks(rng, kind, out_features, in_features):
    """Blocks that no package can make: any bytes, but for the halves that multiply their scales."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (out_features, in_features // weights, size), np.uint8)
    at, halves = (208, 1) if kind == "Q6_K" else (0, 2)
    scales = rng.uniform(0.5, 1, (*blocks.shape[:2], halves)).astype(np.float16) / np.float16(4096)
    blocks[..., at : at + 2 * halves] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2 * halves)
    return blocks.reshape(out_features, -1)
