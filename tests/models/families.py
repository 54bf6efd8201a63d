"""Small random models of three families: their files, and what they compute, in NumPy and float64.

Weights have the names and shapes of Hugging Face's transformers, and settings are those of its `config.json`.
"""

import json

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from safetensors.numpy import save_file


SETTINGS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"type": "linear", "factor": 4.0}  # as older files have it
# Heads of 24: 4 of them are more than the embedding.
QWEN3 = {"model_type": "qwen3", "head_dim": 24}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "linear": {"model_type": "llama", "rope_scaling": LINEAR},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": QWEN3,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def settings_of(family, **changes):
    return SETTINGS | FAMILIES[family] | changes


def random_weights(settings, seed=0):
    rng = np.random.default_rng(seed)
    size, hidden = settings["hidden_size"], settings["intermediate_size"]
    head = settings.get("head_dim", size // settings["num_attention_heads"])
    queries, keys = settings["num_attention_heads"] * head, settings["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (settings["vocab_size"], size), "model.norm.weight": (size,)}
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (settings["vocab_size"], size)
    is_llama = settings["model_type"] == "llama"
    has_bias = {"q_proj": settings["model_type"] == "qwen2" or settings.get("attention_bias", False)}
    has_bias |= {"k_proj": has_bias["q_proj"], "v_proj": has_bias["q_proj"]}
    has_bias["o_proj"] = settings.get("attention_bias", False)
    has_bias |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), is_llama and settings.get("mlp_bias", False))
    for i in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in {
            "self_attn.q_proj": (queries, size),
            "self_attn.k_proj": (keys, size),
            "self_attn.v_proj": (keys, size),
            "self_attn.o_proj": (size, queries),
            "mlp.gate_proj": (hidden, size),
            "mlp.up_proj": (hidden, size),
            "mlp.down_proj": (size, hidden),
        }.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if has_bias[name.split(".")[1]]:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (size,)
        if settings["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                shapes[f"{layer}.self_attn.{name}.weight"] = (head,)
    weights = {}
    for name, shape in shapes.items():
        values = rng.normal(scale=0.2, size=shape)
        weights[name] = (values + ("norm" in name)).astype(np.float32)
    return weights


def frequencies(settings, head):
    """The rotary embedding's, scaled if the settings ask for it: for Llama 3.1 by the rule that its authors published."""
    plain = settings["rope_theta"] ** (-np.arange(0, head, 2) / head)
    scaling = settings.get("rope_scaling")
    if scaling is None:
        return plain
    if scaling.get("type") == "linear":
        return plain / scaling["factor"]
    scaled = []
    for frequency in plain:
        length = 2 * np.pi / frequency
        original = scaling["original_max_position_embeddings"]
        if length < original / scaling["high_freq_factor"]:
            scaled.append(frequency)
        elif length > original / scaling["low_freq_factor"]:
            scaled.append(frequency / scaling["factor"])
        else:
            smooth = original / length - scaling["low_freq_factor"]
            smooth /= scaling["high_freq_factor"] - scaling["low_freq_factor"]
            scaled.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    assert len({s / f for s, f in zip(scaled, plain, strict=True)}) > 2  # all three cases
    return np.array(scaled)


def logits(settings, weights, tokens):
    """Return those of each position of one text, whose tokens see the ones before them."""
    weights = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    group = heads // kv_heads

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + settings["rms_norm_eps"]) * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def rotated(x):
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None, None] * frequencies(settings, x.shape[-1])
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    x = weights["model.embed_tokens.weight"][tokens]
    visible = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for i in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            linear(y, f"{layer}.self_attn.{part}_proj").reshape(len(tokens), count, -1)
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if f"{layer}.self_attn.q_norm.weight" in weights:
            q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
        q, k, v = rotated(q), rotated(k).repeat(group, 1), v.repeat(group, 1)
        scores = np.where(visible, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1]), -np.inf)
        seen = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", seen / seen.sum(-1, keepdims=True), v)
        x = x + linear(attended.reshape(len(tokens), -1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(y, f"{layer}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    return norm(x, "model.norm") @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def write_folder(folder, settings, weights, *, dtype="float32", files=1):
    """Write what transformers' `save_pretrained` writes: the weights in one file, or in several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    weights = {name: weight.astype(DTYPES[dtype]) for name, weight in weights.items()}
    if files == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, index = sorted(weights), {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        save_file({name: weights[name] for name in names[i::files]}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names[i::files], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def write_gguf(path, settings, weights, *, encoding="F32", fields=None):
    """Write what llama.cpp's converter writes: for `llama`, with the rows of queries and keys in pairs."""
    kind, heads = settings["model_type"], settings["num_attention_heads"]
    writer = GGUFWriter(path, kind)
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_rope_freq_base(settings["rope_theta"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_vocab_size(settings["vocab_size"])
    head = settings.get("head_dim", settings["hidden_size"] // heads)
    if "head_dim" in settings:
        writer.add_key_length(head)
        writer.add_value_length(head)
    for add, value in (fields or {}).items():
        getattr(writer, add)(value)
    if settings.get("rope_scaling") == LINEAR:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(LINEAR["factor"])
    elif "rope_scaling" in settings:
        plain = settings["rope_theta"] ** (-np.arange(0, head, 2) / head)
        writer.add_tensor("rope_freqs.weight", (plain / frequencies(settings, head)).astype(np.float32))
    for name, weight in weights.items():
        *layer, part, suffix = name.removeprefix("model.layers.").split(".")
        block = f"blk.{layer[0]}." if layer and layer[0].isdigit() else ""
        inner = ".".join([*layer[1:], part]) if block else ".".join([*layer, part])
        if kind == "llama" and part in ("q_proj", "k_proj"):
            count = heads if part == "q_proj" else settings["num_key_value_heads"]
            halves = weight.reshape(count, 2, -1, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        name = f"{block}{GGUF_NAMES[inner]}.{suffix}"
        if encoding == "F32" or weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            quantisation = GGMLQuantizationType[encoding]
            writer.add_tensor(name, quantize(weight, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
