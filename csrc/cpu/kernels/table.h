// The kernels of the instruction set that this file is compiled for.
#pragma once

#include "cpu/kernels/attention.h"
#include "cpu/kernels/attention_backward.h"
#include "cpu/kernels/cross_entropy.h"
#include "cpu/kernels/decode_attention.h"
#include "cpu/kernels/gates.h"
#include "cpu/kernels/glu.h"
#include "cpu/kernels/int8_linear.h"
#include "cpu/kernels/linear.h"
#include "cpu/kernels/norm_backward.h"
#include "cpu/kernels/quantized_linear.h"
#include "cpu/kernels/rotary_embedding.h"

namespace eqxcallback::cpu {
namespace {

constexpr Kernels kTable = {norm,
                            norm_backward,
                            group_norm,
                            add_rms_norm,
                            rotary_embedding,
                            rotary_embedding_backward,
                            glu,
                            glu_backward,
                            cross_entropy,
                            cross_entropy_backward,
                            lstm_gates,
                            gru_gates,
                            attention,
                            attention_backward,
                            decode_attention,
                            linear,
                            quantized_linear,
                            int8_linear};

}  // namespace
}  // namespace eqxcallback::cpu
