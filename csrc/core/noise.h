// What outputs hold before a kernel that is watched: values that it would hardly write. Elements that have theirs still
// were never written.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace eqxcallback {

// A hash of 64 bits.
constexpr uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30u)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27u)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31u);
}

// Each element has a value of its own, made of a seed and of its place in memory: random bits, some of them fixed.
//
//   bool, and types of less than a byte once each has one    bytes that no such element has
//   floats of at least 16 bits, complex                      NaNs whose payload no computation makes
//   integers of at least 32 bits                             half of the values that are negative, or would be
//   all else                                                 any
//
// Except for the first row, a kernel may write such a value by itself. Then it is one of many, and chance decides
// which: how many elements have their very own says whether chance explains it.
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
          fixed_ = top | 1u;  // not the least one, which masks have
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

  // Of memory that was filled before. In `mask`, if there is one, a byte for each element: 1 where it is left.
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

  // False where chance explains it: a kernel that writes all elements does so in less than one of 2^28 calls.
  bool sure(const Left& left) const {
    if (left.count == 0 || impossible_) return left.count != 0;
    const auto k = static_cast<double>(left.count), n = static_cast<double>(left.alike);
    const double choices = (std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1)) / std::log(2.0);
    return choices - k * static_cast<double>(random_bits_ * words_) - rare_ <= -28;
  }

 private:
  // With `fraction` bits after the exponent. Of those the first makes the NaN a quiet one, and the last its payload
  // another one than that of the NaN which computations make.
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
  unsigned random_bits_ = 0;         // of a word
  double rare_ = 0;                  // log2 of how many kernels there are for one that writes such values at all
  bool impossible_ = false;          // no element has such a value
};

}  // namespace eqxcallback
