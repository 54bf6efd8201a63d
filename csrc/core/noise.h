// Noise that fills the outputs before a watched kernel runs: values that a kernel hardly writes. An element that still
// has its noise afterwards was never written.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace eqxcallback {

// Hashes 64 bits.
constexpr uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30u)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27u)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31u);
}

// Makes a value for each element from a seed and the element's place in memory: random bits, some of them fixed.
//
//   bool, and types of less than a byte once each has one    bytes that no such element has
//   floats of at least 16 bits, complex                      NaNs whose payload no computation makes
//   integers of at least 32 bits                             half of the values that are negative, or would be
//   all other types                                          any
//
// Except for the first row, a kernel may write such a value by itself. Then the value is one of many, and chance
// decides which: the number of elements that have exactly their own value says whether chance explains it.
class Noise {
 public:
  struct Left {
    size_t count = 0;  // elements that have their own value
    size_t alike = 0;  // elements that have any value of the noise
  };

  Noise(const DType& dtype, uint64_t seed) : seed_(seed) {
    word_bytes_ = dtype.packed() ? 1 : dtype.bits / 8u;
    switch (dtype.dlpack) {
      case DLCode::kComplex:
        words_ = 2;
        word_bytes_ /= 2;
        set_nan(word_bytes_ == 8 ? 52 : 23);
        break;
      case DLCode::kFloat:
        set_nan(word_bytes_ == 8 ? 52 : word_bytes_ == 4 ? 23 : 10);
        break;
      case DLCode::kBfloat:
        set_nan(7);
        break;
      case DLCode::kInt:
      case DLCode::kUInt:
        if (word_bytes_ >= 4) {
          const uint64_t top = uint64_t{1} << (8 * word_bytes_ - 1);
          mask_ = top | top >> 1u | 1u;
          fixed_ = top | 1u;  // not the lowest bit, which masks have
        }
        break;
      default:
        break;
    }
    impossible_ = dtype.packed() || dtype.dlpack == DLCode::kBool;
    if (impossible_) {
      mask_ = 0xC0;  // neither zeros before an element nor copies of its sign
      fixed_ = 0x40;
    }
    for (uint64_t bits = ~mask_ << (64 - 8 * word_bytes_); bits != 0; bits &= bits - 1) ++random_bits_;
  }

  void fill(uint8_t* data, size_t count) const {
    with_word([&](auto word) {
      for (size_t i = 0; i < count * words_; ++i) {
        word = at<decltype(word)>(i);
        std::memcpy(data + i * sizeof(word), &word, sizeof(word));
      }
    });
  }

  // Counts the noise that is left in memory that was filled before. `mask`, if given, gets a byte for each element: 1
  // where its noise is left.
  Left left(const uint8_t* data, size_t count, uint8_t* mask = nullptr) const {
    Left left;
    with_word([&](auto word) {
      for (size_t element = 0; element < count; ++element) {
        bool own = true, alike = true;
        for (size_t i = element * words_; i < (element + 1) * words_; ++i) {
          std::memcpy(&word, data + i * sizeof(word), sizeof(word));
          own = own && word == at<decltype(word)>(i);
          alike = alike && (word & mask_) == fixed_;
        }
        left.count += own;
        left.alike += alike;
        if (mask != nullptr) mask[element] = own;
      }
    });
    return left;
  }

  // False if chance explains what is left: with a kernel that writes all elements, true comes less than once in 2^28
  // calls.
  bool sure(const Left& left) const {
    if (left.count == 0 || impossible_) return left.count != 0;
    const auto k = static_cast<double>(left.count), n = static_cast<double>(left.alike);
    const double choices = (std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1)) / std::log(2.0);
    return choices - k * static_cast<double>(random_bits_ * words_) - rare_ <= -28;
  }

 private:
  // Sets the bits of a NaN with `fraction` bits after the exponent. The first of these bits makes the NaN quiet, and
  // the last one gives it another payload than the NaNs that computations make.
  void set_nan(unsigned fraction) {
    const uint64_t sign = uint64_t{1} << (8 * word_bytes_ - 1);
    mask_ = fixed_ = ((sign - 1) & ~((uint64_t{1} << (fraction - 1)) - 1)) | 1u;
    rare_ = 10;  // at most one kernel in a thousand writes any
  }

  template <class Word>
  Word at(size_t i) const {
    return static_cast<Word>((mixed(seed_ + i) & ~mask_) | fixed_);
  }

  template <class Body>
  void with_word(const Body& body) const {
    switch (word_bytes_) {
      case 1:
        return body(uint8_t{});
      case 2:
        return body(uint16_t{});
      case 4:
        return body(uint32_t{});
      default:
        return body(uint64_t{});
    }
  }

  uint64_t seed_;
  unsigned word_bytes_, words_ = 1;  // an element is one word, or two
  uint64_t mask_ = 0, fixed_ = 0;    // the bits of a word that are the same in all noise, and what they are
  unsigned random_bits_ = 0;         // the bits of a word that are random
  double rare_ = 0;                  // log2 of the number of kernels for each one that writes such values at all
  bool impossible_ = false;          // no element has such a value
};

}  // namespace eqxcallback
