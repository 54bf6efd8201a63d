// The kernels of the instruction set that this file is compiled for.
#pragma once

#include "cpu/kernels/attention.h"
#include "cpu/kernels/decode_attention.h"
#include "cpu/kernels/quantized_linear.h"
#include "cpu/kernels/rms_norm.h"
#include "cpu/kernels/rotary_embedding.h"
#include "cpu/kernels/swiglu.h"

namespace eqxcallback::cpu {
namespace {

constexpr Kernels kTable = {rms_norm, rotary_embedding, swiglu, attention, decode_attention, quantized_linear};

}  // namespace
}  // namespace eqxcallback::cpu
