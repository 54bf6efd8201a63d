// Plain C functions, as libraries have them. No header of XLA's.
#include <complex.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// out = a * x + out
void saxpy(int64_t n, float a, const float* x, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += a * x[i];
}

static void sum_into(int64_t n, float factor, const float* dout, int64_t size, float* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = 0;
  for (int64_t i = 0; i < n && size > 0; ++i) out[i % size] += factor * dout[i];
}

// The gradients of a * x + y, of those that are wanted. One that is smaller is of an operand that all examples share.
void saxpy_backward(int64_t n, float a, const float* dout, int64_t x_size, float* dx, int64_t y_size, float* dy) {
  sum_into(n, a, dout, x_size, dx);
  sum_into(n, 1, dout, y_size, dy);
}

// The softmax of each row of so many columns; not zero if there is a negative number.
int softmax_rows(int64_t size, int64_t columns, const double* x, double* out) {
  for (const double* end = x + size; x < end; x += columns, out += columns) {
    double largest = x[0], sum = 0;
    for (int64_t c = 0; c < columns; ++c) {
      if (x[c] < 0) return 3;
      if (x[c] > largest) largest = x[c];
    }
    for (int64_t c = 0; c < columns; ++c) sum += out[c] = exp(x[c] - largest);
    for (int64_t c = 0; c < columns; ++c) out[c] /= sum;
  }
  return 0;
}

// More integers and more floating numbers than there are registers, in any order, of all sizes.
void every_parameter(int8_t a, double b, uint16_t c, float d, int32_t e, float f, int64_t g, double h, bool i, float j,
                     uint8_t k, double l, const float* x, float m, uint64_t n, double o, double p, float q, int16_t r,
                     uint32_t s, float t, double* out) {
  const double values[] = {a, b, c, d, e, f, (double)g, h, i, j, k, l, x[0], m, (double)n, o, p, q, r, s, t};
  memcpy(out, values, sizeof(values));
}

// What the sizes of an array are in a call.
void sizes(int64_t size, int32_t ndim, int64_t first, int last, size_t stride, int64_t* out) {
  const int64_t values[] = {size, ndim, first, last, (int64_t)stride};
  memcpy(out, values, sizeof(values));
}

void nothing(void) {}

// x + its rows' sums so far, by way of a workspace.
void cumulate(int64_t n, const float* x, float* scratch, float* out) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) scratch[i] = sum += x[i];
  memcpy(out, scratch, (size_t)n * sizeof(float));
}

void conjugate(int64_t n, const double complex* x, double complex* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = conj(x[i]);
}

// The upper half of a float: bf16, of which C knows nothing.
void to_bf16(int64_t n, const float* x, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    memcpy(&bits, &x[i], sizeof(bits));
    out[i] = (uint16_t)(bits >> 16);
  }
}

// A weight may be absent.
void scale(int64_t n, const float* x, const float* weight, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = weight == NULL ? x[i] : x[i] * weight[0];
}

// Adds one to each element; each row also says on how many rows its call worked.
void add_one(int64_t rows, int64_t columns, const float* x, const float* weight, float* out, int64_t* together) {
  for (int64_t r = 0; r < rows; ++r) {
    together[r] = rows;
    for (int64_t c = 0; c < columns; ++c) out[r * columns + c] = x[r * columns + c] + weight[c];
  }
}

void writes_too_much(int64_t n, const float* x, float* out) {
  for (int64_t i = 0; i <= n; ++i) out[i] = x[0];
}
