"""A file with a model of two small blocks, with random weights."""

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel


def write_tiny(path, encodings=(), other="F32", context=64, hidden=96, heads=4, kv_heads=2, speaks=False):
    """`speaks`: whether it has a tokenizer, of bytes. Such a model never ends a text."""
    encodings = dict(encodings)
    vocab_size = 64
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(context)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(16)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    if speaks:
        vocab_size = _add_tokenizer(writer)
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
        else:
            kind = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", vocab_size, 64)
    add("output.weight", vocab_size, 64)
    add("output_norm.weight", 64)
    for i in range(2):
        for name, shape in (
            ("attn_norm", (64,)),
            ("attn_q", (16 * heads, 64)),
            ("attn_k", (16 * kv_heads, 64)),
            ("attn_v", (16 * kv_heads, 64)),
            ("attn_output", (64, 16 * heads)),
            ("ffn_norm", (64,)),
            ("ffn_gate", (hidden, 64)),
            ("ffn_up", (hidden, 64)),
            ("ffn_down", (64, hidden)),
        ):
            add(f"blk.{i}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer):
    tokens = ["<|im_end|>", *sorted(ByteLevel.alphabet()), "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] + [TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}")
    return len(tokens)
