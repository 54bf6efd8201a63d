"""Products with weights: floats, blocks of a few bits, int8; and rows of a table."""

from ._int8 import Activations as Activations, int8_linear as int8_linear, quantize_int8 as quantize_int8
from ._interleaved import (
    DEINTERLEAVED as DEINTERLEAVED,
    INTERLEAVED as INTERLEAVED,
    INTERLEAVED_ROWS as INTERLEAVED_ROWS,
    deinterleave_rows as deinterleave_rows,
    interleave_rows as interleave_rows,
)
from ._linear import embedding as embedding, linear as linear
from ._quantized import (
    ENCODINGS as ENCODINGS,
    Encoding as Encoding,
    dequantize as dequantize,
    quantize as quantize,
    quantized_linear as quantized_linear,
)
