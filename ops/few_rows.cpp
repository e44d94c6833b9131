// What decoding on a CPU spends its time with, as fast as memory is read: few_rows, y = x W^T for a few rows of x, of which each thread
// takes a share of W's rows; and one_query, attention of one query a row over its cache.
// Weights: float32, bfloat16, int8 (a scale a row), or 4 bits (scale and zero a group of 32, see ops/few_rows.py).
// Plain loops of fixed width, which compilers turn into whatever vectors the processor has.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>
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

inline floats lanes(const float* w) { return get<floats>(w); }
inline floats lanes(const at::BFloat16* w) { return (floats)(widened((const uint16_t*)w) << 16); }

template <typename W>   // float32 and bfloat16
inline void unpack(const W* w, floats* out) {
  for (int i = 0; i < PARTS; i++) out[i] = lanes(w + i * LANES);
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

// M rows of x against R rows of W, `row` elements apart: y[m][r]. sums: of each row's groups of 32, which a group's zero is multiplied with.
template <int M, int R, typename W>
void dots(const W* w, int64_t row, const float* x, int64_t K, const at::Half* pairs, const float* sums, float (*y)[R]) {
  constexpr bool grouped = std::is_same_v<W, uint8_t>;
  constexpr int CHAINS = M * R >= 8 ? 1 : M * R >= 4 ? 2 : PARTS;   // 4 sums or more at once hide the latency of a multiply-add
  const int64_t G = K / WIDE;
  floats total[M][R][CHAINS] = {};
  float zeros[M][R] = {};
  for (int64_t g = 0; g < G; g++) {
    floats wide[R][PARTS];
    for (int r = 0; r < R; r++) {
      unpack(w + r * row + g * (grouped ? WIDE / 2 : WIDE), wide[r]);
      if constexpr (grouped) {
        const float scale = single(pairs + (r * G + g) * 2), zero = single(pairs + (r * G + g) * 2 + 1);
        for (int i = 0; i < PARTS; i++) wide[r][i] *= scale;
        for (int m = 0; m < M; m++) zeros[m][r] += zero * sums[m * G + g];
      }
    }
    for (int i = 0; i < PARTS; i++)
      for (int m = 0; m < M; m++) {
        const floats some = get<floats>(x + m * K + g * WIDE + i * LANES);
        for (int r = 0; r < R; r++) total[m][r][i % CHAINS] += wide[r][i] * some;
      }
  }
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) {
      floats sum = total[m][r][0];
      for (int i = 1; i < CHAINS; i++) sum += total[m][r][i];
      y[m][r] = zeros[m][r];
      for (int i = 0; i < LANES; i++) y[m][r] += sum[i];
    }
}

template <typename W>
void all(const W* w, const float* x, int64_t M, int64_t N, int64_t K, const float* scale, const at::Half* pairs, const float* sums,
         const float* bias, float* y) {
  const int64_t row = std::is_same_v<W, uint8_t> ? K / 2 : K, G = K / WIDE;
  auto some = [&]<int m_, int r_>(int64_t m, int64_t n) {
    float out[m_][r_];
    dots<m_, r_>(w + n * row, row, x + m * K, K, pairs ? pairs + n * G * 2 : nullptr, sums ? sums + m * G : nullptr, out);
    for (int i = 0; i < m_; i++)
      for (int j = 0; j < r_; j++) y[(m + i) * N + n + j] = out[i][j] * (scale ? scale[n + j] : 1) + (bias ? bias[n + j] : 0);
  };
  auto rows = [&]<int r_>(int64_t n) {
    int64_t m = 0;
    for (; m + 4 <= M; m += 4) some.template operator()<4, r_>(m, n);
    if (M - m == 3) some.template operator()<3, r_>(m, n);
    if (M - m == 2) some.template operator()<2, r_>(m, n);
    if (M - m == 1) some.template operator()<1, r_>(m, n);
  };
  at::parallel_for(0, N, std::max<int64_t>(2, 32768 / K), [&](int64_t begin, int64_t end) {
    int64_t n = begin;
    if (M > 1)
      for (; n + 2 <= end; n += 2) rows.template operator()<2>(n);   // two rows of W at once halve what is read of x
    for (; n < end; n++) rows.template operator()<1>(n);
  });
}

// x (..., K), w (N, K) or (N, K / 2) bytes, K a multiple of 32, bias (N,) or none -> (..., N) as x; computed in float32
at::Tensor few_rows(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& bias) {
  const int64_t K = x.size(-1), N = w.size(0);
  TORCH_CHECK(K % WIDE == 0 && w.is_contiguous() && w.size(1) == (w.scalar_type() == at::kByte ? K / 2 : K), "few_rows: W does not fit x");
  const at::Tensor rows = x.to(at::kFloat).contiguous();
  const int64_t M = rows.numel() / K;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = N;
  at::Tensor y = at::empty(sizes, rows.options());
  const float* px = rows.const_data_ptr<float>();
  const std::optional<at::Tensor> wide = bias ? std::optional(bias->to(at::kFloat).contiguous()) : std::nullopt;
  const float* pb = wide ? wide->const_data_ptr<float>() : nullptr;
  float* py = y.data_ptr<float>();
  switch (w.scalar_type()) {
    case at::kFloat: all(w.const_data_ptr<float>(), px, M, N, K, nullptr, nullptr, nullptr, pb, py); break;
    case at::kBFloat16: all(w.const_data_ptr<at::BFloat16>(), px, M, N, K, nullptr, nullptr, nullptr, pb, py); break;
    case at::kChar: all(w.const_data_ptr<int8_t>(), px, M, N, K, scale->const_data_ptr<float>(), nullptr, nullptr, pb, py); break;
    case at::kByte: {
      const at::Tensor sums = rows.view({M, K / WIDE, WIDE}).sum(-1);
      all(w.const_data_ptr<uint8_t>(), px, M, N, K, nullptr, scale->const_data_ptr<at::Half>(), sums.const_data_ptr<float>(), pb, py);
      break;
    }
    default: TORCH_CHECK(false, "few_rows: weights of ", w.scalar_type());
  }
  return y.to(x.scalar_type());
}

// R query heads (R, D) that share the S keys and values, of which `seen` (a number a key, added; or null) may hide some. scores: (R, S).
template <typename T>
void attended(const float* q, const T* k, const T* v, int64_t k_step, int64_t v_step, const float* seen, int64_t seen_step, int64_t R,
              int64_t S, int64_t D, float scale, float* scores, float* y) {
  for (int64_t s = 0; s < S; s++)
    for (int64_t r = 0; r < R; r++) {
      floats sum = {};
      for (int64_t d = 0; d < D; d += LANES) sum += lanes(k + s * k_step + d) * get<floats>(q + r * D + d);
      float t = 0;
      for (int i = 0; i < LANES; i++) t += sum[i];
      scores[r * S + s] = t * scale + (seen ? seen[r * seen_step + s] : 0);
    }
  std::fill(y, y + R * D, 0.0f);
  for (int64_t r = 0; r < R; r++) {
    float *w = scores + r * S, total = 0, most = *std::max_element(w, w + S);
    for (int64_t s = 0; s < S; s++) total += w[s] = std::exp(w[s] - most);
    for (int64_t s = 0; s < S; s++) w[s] /= total;
  }
  for (int64_t s = 0; s < S; s++)
    for (int64_t r = 0; r < R; r++)
      for (int64_t d = 0; d < D; d += LANES) {
        const floats sum = get<floats>(y + r * D + d) + lanes(v + s * v_step + d) * scores[r * S + s];
        std::memcpy(y + r * D + d, &sum, sizeof(sum));
      }
}

// q (B, H, 1, D), k and v (B, G, S, D), D a multiple of 16, mask (B or 1, H or 1, 1, S), a number that is added -> (B, H, 1, D) as q
at::Tensor one_query(const at::Tensor& query, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double scale) {
  const at::Tensor q = query.to(at::kFloat).contiguous();
  const std::optional<at::Tensor> seen = mask ? std::optional(mask->to(at::kFloat).contiguous()) : std::nullopt;
  const int64_t B = q.size(0), H = q.size(1), D = q.size(3), G = k.size(1), S = k.size(2), R = H / G;
  TORCH_CHECK(!seen || seen->size(3) == S, "one_query: the mask does not fit");
  TORCH_CHECK(D % LANES == 0 && k.stride(3) == 1 && v.stride(3) == 1 && k.scalar_type() == v.scalar_type(), "one_query: shapes");
  at::Tensor y = at::empty_like(q);
  const float *pq = q.const_data_ptr<float>(), *hidden = seen ? seen->const_data_ptr<float>() : nullptr;
  const int64_t by_row = seen && seen->size(0) > 1 ? seen->stride(0) : 0, by_head = seen && seen->size(1) > 1 ? seen->stride(1) : 0;
  auto run = [&](auto* pk, auto* pv) {
    at::parallel_for(0, B * G, std::max<int64_t>(1, 16384 / (R * S * D)), [&](int64_t begin, int64_t end) {
      std::vector<float> scores(R * S);
      for (int64_t i = begin; i < end; i++) {
        const int64_t b = i / G, g = i % G, at = (b * H + g * R) * D;
        attended(pq + at, pk + b * k.stride(0) + g * k.stride(1), pv + b * v.stride(0) + g * v.stride(1), k.stride(2), v.stride(2),
                 hidden ? hidden + b * by_row + g * R * by_head : nullptr, by_head, R, S, D, scale, scores.data(), y.data_ptr<float>() + at);
      }
    });
  };
  if (k.scalar_type() == at::kFloat) run(k.const_data_ptr<float>(), v.const_data_ptr<float>());
  else run(k.const_data_ptr<at::BFloat16>(), v.const_data_ptr<at::BFloat16>());
  return y.to(query.scalar_type());
}

}  // namespace

TORCH_LIBRARY(heed, m) {
  m.def("few_rows(Tensor x, Tensor w, Tensor? scale, Tensor? bias) -> Tensor");
  m.def("one_query(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(heed, CPU, m) {
  m.impl("few_rows", few_rows);
  m.impl("one_query", one_query);
}
