// The kernels of the instruction set that this file is compiled for.
#pragma once

#include "cpu/kernels/attention.h"
#include "cpu/kernels/attention_backward.h"
#include "cpu/kernels/attention_decode.h"
#include "cpu/kernels/gelu.h"
#include "cpu/kernels/glu.h"
#include "cpu/kernels/linear.h"
#include "cpu/kernels/linear_int8.h"
#include "cpu/kernels/linear_quantized.h"
#include "cpu/kernels/loss.h"
#include "cpu/kernels/matrix_product.h"
#include "cpu/kernels/multiply_adds.h"
#include "cpu/kernels/norm_backward.h"
#include "cpu/kernels/recurrent.h"
#include "cpu/kernels/rotary.h"
#include "cpu/kernels/softmax.h"

namespace eqxcallback::cpu {
namespace {

constexpr Kernels kTable = {norm,
                            norm_backward,
                            group_norm,
                            group_norm_backward,
                            add_rms_norm,
                            rotary_embedding,
                            rotary_embedding_backward,
                            rotary_append,
                            glu,
                            glu_backward,
                            gelu,
                            gelu_backward,
                            cross_entropy,
                            cross_entropy_backward,
                            softmax,
                            softmax_backward,
                            lstm_gates,
                            lstm_gates_backward,
                            gru_gates,
                            gru_gates_backward,
                            attention,
                            attention_backward,
                            decode_attention,
                            linear,
                            linear_rows,
                            matrix_product,
                            product_bytes,
                            quantized_linear,
                            int8_linear,
                            multiply_adds};

}  // namespace
}  // namespace eqxcallback::cpu
