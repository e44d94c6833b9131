// y = x W^T for a few rows of x, as fast as W can be read: each thread takes a share of W's rows and reads them once.
// Weights: float32, bfloat16, int8 (a scale a row), or 4 bits (scale and zero a group of 32, see ops/few_rows.py).
// Plain loops of fixed width, which compilers turn into whatever vectors the processor has.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int WIDE = 32, PARTS = WIDE / LANES;   // channels at once, in 2 or 4 vectors: their sums hide the latency of a multiply-add

using floats = float __attribute__((vector_size(4 * LANES)));
using ints = int32_t __attribute__((vector_size(4 * LANES)));

template <typename V>
inline V get(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

// To 32 bits each. Compilers do it one by one, so that the processors most have are told how.
#if defined(__AVX512F__)
inline ints widened(const int8_t* w) { return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)w)); }
inline ints widened(const uint8_t* w) { return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)w)); }
inline ints widened(const uint16_t* w) { return (ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)w)); }
#elif defined(__AVX2__)
inline ints widened(const int8_t* w) { return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)w)); }
inline ints widened(const uint8_t* w) { return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)w)); }
inline ints widened(const uint16_t* w) { return (ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)w)); }
#else
template <typename T>
inline ints widened(const T* w) {
  using narrow = T __attribute__((vector_size(LANES * sizeof(T))));
  return __builtin_convertvector(get<narrow>(w), ints);
}
#endif

inline void unpack(const float* w, floats* out) {
  for (int i = 0; i < PARTS; i++) out[i] = get<floats>(w + i * LANES);
}

inline void unpack(const at::BFloat16* w, floats* out) {
  for (int i = 0; i < PARTS; i++) out[i] = (floats)(widened((const uint16_t*)w + i * LANES) << 16);
}

inline void unpack(const int8_t* w, floats* out) {
  for (int i = 0; i < PARTS; i++) out[i] = __builtin_convertvector(widened(w + i * LANES), floats);
}

inline void unpack(const uint8_t* w, floats* out) {   // the first 16 channels are in the low halves of 16 bytes
  for (int i = 0; i < PARTS / 2; i++) {
    const ints both = widened(w + i * LANES);
    out[i] = __builtin_convertvector(both & 15, floats), out[i + PARTS / 2] = __builtin_convertvector(both >> 4, floats);
  }
}

#ifdef __FLT16_MAX__
inline float single(const at::Half* h) { return static_cast<float>(get<_Float16>(h)); }   // an instruction where there is one
#else
inline float single(const at::Half* h) { return *h; }
#endif

// M rows of x against one row of W. sums: of each row's groups of 32, which a group's zero is multiplied with.
template <int M, typename W>
void dots(const W* w, const float* x, int64_t K, const at::Half* pairs, const float* sums, float* y) {
  constexpr bool grouped = std::is_same_v<W, uint8_t>;
  floats total[M][PARTS] = {};
  float zeros[M] = {};
  for (int64_t k = 0; k < K; k += WIDE, w += grouped ? WIDE / 2 : WIDE) {
    floats wide[PARTS];
    unpack(w, wide);
    if constexpr (grouped) {
      const float scale = single(pairs + k / WIDE * 2), zero = single(pairs + k / WIDE * 2 + 1);
      for (int i = 0; i < PARTS; i++) wide[i] *= scale;
      for (int m = 0; m < M; m++) zeros[m] += zero * sums[m * (K / WIDE) + k / WIDE];
    }
    for (int m = 0; m < M; m++)
      for (int i = 0; i < PARTS; i++) total[m][i] += wide[i] * get<floats>(x + m * K + k + i * LANES);
  }
  for (int m = 0; m < M; m++) {
    floats sum = total[m][0];
    for (int i = 1; i < PARTS; i++) sum += total[m][i];
    y[m] = zeros[m];
    for (int i = 0; i < LANES; i++) y[m] += sum[i];
  }
}

template <typename W>
void all(const W* w, const float* x, int64_t M, int64_t N, int64_t K, const float* scale, const at::Half* pairs, const float* sums, float* y) {
  const int64_t row = std::is_same_v<W, uint8_t> ? K / 2 : K;
  at::parallel_for(0, N, std::max<int64_t>(1, 32768 / K), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++)
      for (int64_t m = 0; m < M;) {
        float out[4];
        const float* xs = x + m * K;
        const float* s = sums ? sums + m * (K / WIDE) : nullptr;
        const at::Half* p = pairs ? pairs + n * (K / WIDE) * 2 : nullptr;
        const int some = static_cast<int>(std::min<int64_t>(4, M - m));
        if (some == 4) dots<4>(w + n * row, xs, K, p, s, out);
        else if (some == 3) dots<3>(w + n * row, xs, K, p, s, out);
        else if (some == 2) dots<2>(w + n * row, xs, K, p, s, out);
        else dots<1>(w + n * row, xs, K, p, s, out);
        for (int i = 0; i < some; i++) y[(m + i) * N + n] = scale ? out[i] * scale[n] : out[i];
        m += some;
      }
  });
}

// x (M, K) float32, w (N, K) or (N, K / 2) bytes, K a multiple of 32 -> (M, N) float32
at::Tensor few_rows(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& scale) {
  const int64_t M = x.size(0), K = x.size(1), N = w.size(0);
  TORCH_CHECK(K % WIDE == 0 && x.is_contiguous() && w.is_contiguous() && x.scalar_type() == at::kFloat, "few_rows: shapes");
  TORCH_CHECK(w.size(1) == (w.scalar_type() == at::kByte ? K / 2 : K), "few_rows: W does not fit x");
  at::Tensor y = at::empty({M, N}, x.options());
  const float* px = x.const_data_ptr<float>();
  float* py = y.data_ptr<float>();
  switch (w.scalar_type()) {
    case at::kFloat: all(w.const_data_ptr<float>(), px, M, N, K, nullptr, nullptr, nullptr, py); break;
    case at::kBFloat16: all(w.const_data_ptr<at::BFloat16>(), px, M, N, K, nullptr, nullptr, nullptr, py); break;
    case at::kChar: all(w.const_data_ptr<int8_t>(), px, M, N, K, scale->const_data_ptr<float>(), nullptr, nullptr, py); break;
    case at::kByte: {
      const at::Tensor sums = x.view({M, K / WIDE, WIDE}).sum(-1);
      all(w.const_data_ptr<uint8_t>(), px, M, N, K, nullptr, scale->const_data_ptr<at::Half>(), sums.const_data_ptr<float>(), py);
      break;
    }
    default: TORCH_CHECK(false, "few_rows: weights of ", w.scalar_type());
  }
  return y;
}

}  // namespace

TORCH_LIBRARY(heed, m) { m.def("few_rows(Tensor x, Tensor w, Tensor? scale) -> Tensor"); }
TORCH_LIBRARY_IMPL(heed, CPU, m) { m.impl("few_rows", few_rows); }
