// Vectors of the target machine, with products of small matrices and exponentials.
//
// A is the dtype of sums, float or double. A product keeps kRows x kVectors vectors of sums in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace ringjax {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kRows = 6, kVectors = 4;
#elif defined(__AVX__)
constexpr int kBytes = 32, kRows = 6, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kBytes = 16, kRows = 6, kVectors = 4;
#else
constexpr int kBytes = 16, kRows = 6, kVectors = 2;
#endif

template <class A>
struct Vectors;
template <>
struct Vectors<float> {
  typedef float Floats __attribute__((vector_size(kBytes)));
  typedef float InMemory __attribute__((vector_size(kBytes), may_alias));
  typedef int32_t Ints __attribute__((vector_size(kBytes)));
  typedef int32_t IntsInMemory __attribute__((vector_size(kBytes), may_alias));
  using Int = int32_t;
};
template <>
struct Vectors<double> {
  typedef double Floats __attribute__((vector_size(kBytes)));
  typedef double InMemory __attribute__((vector_size(kBytes), may_alias));
  typedef int64_t Ints __attribute__((vector_size(kBytes)));
  typedef int64_t IntsInMemory __attribute__((vector_size(kBytes), may_alias));
  using Int = int64_t;
};
template <class A>
using Floats = typename Vectors<A>::Floats;
template <class A>
using Ints = typename Vectors<A>::Ints;
template <class A>
using Int = typename Vectors<A>::Int;
template <class A>
constexpr int kLanes = kBytes / sizeof(A);

template <class A>
inline Floats<A> load(const A* x) {
  return *reinterpret_cast<const typename Vectors<A>::InMemory*>(x);
}
template <class A>
inline Ints<A> load_ints(const Int<A>* x) {
  return *reinterpret_cast<const typename Vectors<A>::IntsInMemory*>(x);
}
template <class A>
inline void store(A* x, Floats<A> y) {
  *reinterpret_cast<typename Vectors<A>::InMemory*>(x) = y;
}
template <class A>
inline Floats<A> all(A x) {
  return x - Floats<A>{};
}

// Computes c (M, V vectors) = a b, or += a b, for `a` with M rows and `b` with `depth` rows. Each call sums from
// 0 and then adds to `c`, so that a total over many blocks is rounded once per block, not once per term.
template <class A, int M, int V>
inline void multiply(A* c, int c_row, const A* a, int a_row, int a_col, const A* b, int b_row, int depth, bool adds) {
  Floats<A> sums[M][V];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < V; ++j) sums[i][j] = Floats<A>{};
  for (int k = 0; k < depth; ++k) {
    Floats<A> row[V];
    for (int j = 0; j < V; ++j) row[j] = load<A>(b + k * b_row + j * kLanes<A>);
    for (int i = 0; i < M; ++i) {
      const Floats<A> factor = all<A>(a[i * a_row + k * a_col]);
      for (int j = 0; j < V; ++j) sums[i][j] += factor * row[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < V; ++j) {
      A* to = c + i * c_row + j * kLanes<A>;
      store<A>(to, adds ? load<A>(to) + sums[i][j] : sums[i][j]);
    }
}

template <class A, int V, int M = kRows>
inline void multiply_rows(int rows, A* c, int c_row, const A* a, int a_row, int a_col, const A* b, int b_row,
                          int depth, bool adds) {
  if constexpr (M > 0) {
    int i = 0;
    for (; i + M <= rows; i += M)
      multiply<A, M, V>(c + i * c_row, c_row, a + i * a_row, a_row, a_col, b, b_row, depth, adds);
    if (i < rows)
      multiply_rows<A, V, M - 1>(rows - i, c + i * c_row, c_row, a + i * a_row, a_row, a_col, b, b_row, depth, adds);
  }
}

// Computes c (rows, columns) = a b, or += a b. Element (i, k) of `a` is at i * a_row + k * a_col. Rows of `b` and `c`
// are `b_row` and `c_row` apart. `columns` is a multiple of the number of lanes.
template <class A, int V = kVectors>
inline void product(int rows, int columns, A* c, int c_row, const A* a, int a_row, int a_col, const A* b, int b_row,
                    int depth, bool adds) {
  if constexpr (V > 0) {
    constexpr int width = V * kLanes<A>;
    int j = 0;
    for (; j + width <= columns; j += width)
      multiply_rows<A, V>(rows, c + j, c_row, a, a_row, a_col, b + j, b_row, depth, adds);
    if (j < columns)
      product<A, V - 1>(rows, columns - j, c + j, c_row, a, a_row, a_col, b + j, b_row, depth, adds);
  }
}

// Returns exp(x) with an error of one or two ulps, and 0 if the result would be subnormal. NaN stays NaN. `x` must not
// be far above 0.
inline Floats<float> exponential(Floats<float> x) {
  const float magic = 12582912.0f;  // 1.5 * 2**23: adding it rounds to integers
  const Floats<float> shifted = x * 1.44269504f + magic;
  const Floats<float> r = x - (shifted - magic) * 0.693147182f;
  Floats<float> y = all(0.00139412156f);
  y = y * r + 0.00836922279f;
  y = y * r + 0.0416663516f;
  y = y * r + 0.166665046f;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const Ints<float> power = ((Ints<float>)shifted + 127) << 23;  // bits of a power of two
  return x < -87.3f ? Floats<float>{} : y * (Floats<float>)power;
}

inline Floats<double> exponential(Floats<double> x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2**52
  const Floats<double> shifted = x * 1.4426950408889634 + magic;
  const Floats<double> r = x - (shifted - magic) * 0.69314718055994531;
  Floats<double> y = all(1.0 / 6227020800.0);
  for (double factor : {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
                        1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0})
    y = y * r + factor;
  const Ints<double> power = ((Ints<double>)shifted + 1023) << 52;
  return x < -708.0 ? Floats<double>{} : y * (Floats<double>)power;
}

// 16-bit floats, as stored.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
inline float to_float(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  uint32_t bits = (rest << 13) + (112u << 23);  // changes the exponent bias from 15 to 127
  float y;
  if (rest >= 0x7c00u) bits += 112u << 23;  // inf and NaN
  if (rest < 0x0400u) {                     // subnormal: a multiple of 2**-24
    y = static_cast<float>(rest) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &y, sizeof bits);
  }
  bits |= sign;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }

}  // namespace ringjax
