"""The instances of every CUDA kernel."""

import itertools

from eqxcallback.ops.glu import _cuda as glu_cuda
from eqxcallback.ops.linear import _cuda as linear_cuda


_BOOLEANS = ("false", "true")
# For each file, its kernels with `{T}` for the element type.
TEMPLATES = {
    "norm/norm.cu": [
        *(
            f"normalize<{{T}}, {', '.join(flags)}>"
            for flags in itertools.product(_BOOLEANS, repeat=4)
            if flags[1] == "true" or flags[3] == "false"  # what is read ahead is a weight
        ),
        # Without a weight there is no gradient of it.
        *(
            f"normalize_backward<{{T}}, {', '.join(flags)}>"
            for flags in itertools.product(_BOOLEANS, repeat=4)
            if flags[1:3] != ("false", "true")
        ),
        "normalize_backward_sum<{T}>",
        *(f"add_normalize<{{T}}, {flags}>" for flags in ("false, false", "true, false", "true, true")),
        *(f"add_normalize_backward<{{T}}, {flags}>" for flags in ("false, false", "true, false", "true, true")),
        "add_normalize_backward_sum<{T}>",
    ],
    "norm/group_norm.cu": [
        *(f"group_norm<{{T}}, {', '.join(flags)}>" for flags in itertools.product(_BOOLEANS, repeat=2)),
        *(f"group_norm_backward<{{T}}, {weight}>" for weight in _BOOLEANS),
        "group_norm_backward_sum<{T}>",
    ],
    "norm/group_norm_parts.cu": [
        *(f"group_norm{kernel}<{{T}}>" for kernel in ("_moments", "_backward_moments", "_backward_parts_sum")),
        *(f"group_norm_of_parts<{{T}}, {', '.join(flags)}>" for flags in itertools.product(_BOOLEANS, repeat=2)),
        *(f"group_norm_backward_{kernel}<{{T}}, {weight}>" for kernel in ("sums", "of_parts") for weight in _BOOLEANS),
    ],
    "rotary/rotary.cu": [
        *(f"rotary_{kernel}<{{T}}>" for kernel in ("embedding", "append")),
        *(f"rotary_embedding_backward<{{T}}, {table}>" for table in _BOOLEANS),
    ],
    "glu/glu.cu": [
        f"glu{part}<{{T}}, eqxcallback::{activation}, {packed}>"
        for part in ("", "_backward")
        for activation in glu_cuda.ACTIVATIONS
        for packed in _BOOLEANS
    ],
    "loss/loss.cu": [
        f"cross_entropy{kernel}>"
        for part in ("", "_backward")
        for kernel in (f"{part}<{{T}}, false", f"{part}<{{T}}, true", f"_of_targets{part}<{{T}}")
    ],
    "softmax/softmax.cu": [f"softmax{part}<{{T}}, {mask}>" for part in ("", "_backward") for mask in _BOOLEANS],
    "cache/cache.cu": ["cache_append"],
    "recurrent/recurrent.cu": [
        *(f"{cell}_gates{part}<{{T}}>" for cell in ("lstm", "gru") for part in ("", "_backward")),
        "gru_gates_backward_sum<{T}>",
    ],
    "attention/decode.cu": [
        *(
            f"decode_attention<{{T}}, {cache}, {shape}>"
            for cache in ("{T}", "signed char")
            for shape in (
                *(
                    f"{shape}, {more}"
                    for shape in ("1, 16, true", "2, 16, true", "4, 8, true", "4, 16, true", "2, 16, false")
                    for more in _BOOLEANS
                    if (cache, shape) != ("signed char", "4, 8, true")
                ),
            )
        ),
        *(f"decode_attention<{{T}}, {{T}}, 2, 32, {packed}, false>" for packed in _BOOLEANS),
        *(f"decode_attention_join<{{T}}, {cache}>" for cache in ("{T}", "signed char")),
    ],
    "attention/decode_backward.cu": [
        *(
            f"decode_attention_backward{kernel}, {packed}, {options}>"
            for cache, heads_and_columns in (
                ("{T}", ("1, 8", "2, 8", "4, 8", "1, 16", "2, 16", "1, 32")),
                ("signed char", ("1, 16", "2, 16")),
            )
            for kernel in dict.fromkeys(
                of
                for shape in heads_and_columns
                for of in (f"<{{T}}, {cache}, {shape}", f"_keys<{{T}}, {cache}, {shape.split()[1]}")
            )
            for packed in _BOOLEANS
            # Capped or not, and with slopes, which rows of 32 columns have not.
            for options in ("false, false", "true, false", "true, true")
            if not (kernel.endswith(" 32") and "true" in options)
            and (packed == "true" or not kernel.endswith(" 1, 16"))
        ),
        *(
            f"decode_attention_backward_{kernel}>"
            for cache in ("{T}", "signed char")
            for kernel in (*(f"join<{{T}}, {cache}, {sloped}" for sloped in _BOOLEANS), f"slopes<{{T}}, {cache}")
        ),
    ],
    "attention/decode_mma.cu": [
        *(
            f"decode_attention_{kernel}>"
            for types in ("{T}, {T}", "__nv_bfloat16, signed char")
            for kernel in (
                *(f"mma<{types}, {size}, {m}" for size in (16, 48, 64, 80, 96, 128, 256) for m in _BOOLEANS),
                f"join<{types}",
            )
        ),
    ],
    "linear/quantized.cu": [
        *(
            f"quantized_linear<{{T}}, eqxcallback::{e}, {rows}{gated}>"
            for e in ("Q4_1", "Q8_0")
            for rows in (1, 2, 4, 8)
            for gated in ("", ", true")
        ),
        *(f"quantized_linear_tiled<{{T}}, eqxcallback::{e}>" for e in ("Q4_1", "Q8_0")),
        *(
            f"quantized_linear{of}"
            for e in linear_cuda.ENCODINGS
            if e not in ("Q4_1", "Q8_0")
            for of in (
                *(f"<{{T}}, eqxcallback::{e}, {rows}>" for rows in (1, 4, 8)),
                f"<{{T}}, eqxcallback::{e}, 1, true>",
                f"_tiled<{{T}}, eqxcallback::{e}>",
            )
        ),
    ],
    "linear/quantized_mma.cu": [
        f"quantized_linear_mma<{{T}}, eqxcallback::{e}, {', '.join(map(str, layout))}{gated}>"
        for e in linear_cuda._STRIDE_BY_MMA
        for layout in ((1, 4), (1, 8), (2, 4), (4, 4), (8, 4))
        if layout[0] <= linear_cuda._MOST_ROW_TILES.get(e, 8)
        for gated in ("", ", true")
    ],
}
