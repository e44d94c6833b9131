// What decoding on a CPU spends its time with, as fast as memory is read: few_rows, y = x W^T for a few rows of x, of which each thread
// takes a share of W's rows; one_query, attention of one query a row over its cache; and mlp and attention, the halves of a block whole.
//
// Weights: float32, bfloat16, int8 (a scale a row), or 4 bits (scale and zero a group of 32, see ops/few_rows.py).
// Plain loops of fixed width, which compilers turn into whatever vectors the processor has. Where it multiplies bfloat16 and int8 as they
// lie (AVX512-BF16 and VNNI, in tiles with AMX), W's bytes meet x in their own type: int8 two columns, the high and low half of 16 bits.

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
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define NATIVE 1
#endif
#if defined(NATIVE) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int WIDE = 32, PARTS = WIDE / LANES;   // channels at once, in 2 or 4 vectors: their sums hide the latency of a multiply-add
constexpr int BLOCK = 16;                        // of W's rows, the unit of the threads' shares
constexpr int64_t AHEAD = 8192;                  // bytes that are asked for before they are read

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

inline float sum(floats v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#else
  float all = 0;
  for (int i = 0; i < LANES; i++) all += v[i];
  return all;
#endif
}

inline void fetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i);
}

#ifdef __FLT16_MAX__
inline float single(const at::Half* h) { return static_cast<float>(get<_Float16>(h)); }   // an instruction where there is one
#else
inline float single(const at::Half* h) { return *h; }
#endif

// A tensor of float32 or bfloat16 numbers, read as float32; none is none.
struct Numbers {
  at::Tensor kept;
  const void* data = nullptr;
  bool half = false;

  explicit Numbers(const std::optional<at::Tensor>& t) {
    if (!t) return;
    half = t->scalar_type() == at::kBFloat16;
    kept = (half ? *t : t->to(at::kFloat)).contiguous(), data = kept.const_data_ptr();
  }
  float operator[](int64_t i) const { return half ? float(((const at::BFloat16*)data)[i]) : ((const float*)data)[i]; }
};

// A linear layer: W (N, K), or (N, K / 2) bytes of 4-bit codes.
struct Layer {
  const at::Tensor& w;
  int64_t N, K, bytes;            // of a row of W
  const at::Half* pairs = nullptr;
  const float* scale = nullptr;
  Numbers bias;

  Layer(const at::Tensor& w, const std::optional<at::Tensor>& s, const std::optional<at::Tensor>& b)
      : w(w), N(w.size(0)), K(w.size(1) * (w.scalar_type() == at::kByte ? 2 : 1)), bytes(w.size(1) * w.element_size()), bias(b) {
    TORCH_CHECK(w.is_contiguous() && K % WIDE == 0, "few_rows: W's rows must be contiguous, and a multiple of 32");
    if (w.scalar_type() == at::kByte) pairs = s->const_data_ptr<at::Half>();
    if (w.scalar_type() == at::kChar) scale = s->const_data_ptr<float>();
  }
};

// f(begin, end) for each thread's share of W's rows.
template <typename F>
void shares(const Layer& l, const F& f) {
  at::parallel_for(0, (l.N + BLOCK - 1) / BLOCK, std::max<int64_t>(1, 32768 / (l.K * BLOCK)), [&](int64_t begin, int64_t end) {
    f(begin * BLOCK, std::min(l.N, end * BLOCK));
  });
}

// f<8>(n) or so for rows n, n + 1, ... of W side by side, which share what is read of x.
template <int R, typename F>
void side_by_side(int64_t begin, int64_t end, const F& f) {
  for (; begin + R <= end; begin += R) f.template operator()<R>(begin);
  for (; begin < end; begin++) f.template operator()<1>(begin);
}

// in float32

// Channels g * 32 to g * 32 + 31 of a row of W.
template <typename W>
inline void read(const W* w, const at::Half* pairs, int64_t g, floats* out) {
  constexpr bool grouped = std::is_same_v<W, uint8_t>;
  unpack(w + g * (grouped ? WIDE / 2 : WIDE), out);
  if constexpr (grouped) {
    const float scale = single(pairs + 2 * g), zero = single(pairs + 2 * g + 1);
    for (int i = 0; i < PARTS; i++) out[i] = out[i] * scale + zero;
  }
}

// R rows of W against one of x
template <int R, typename W>
void dots(const W* w, int64_t row, const at::Half* pairs, const float* x, int64_t G, float* y) {
  constexpr int CHAINS = R >= 4 ? 1 : PARTS;      // 4 sums or more at once hide the latency of a multiply-add
  floats total[R][CHAINS] = {}, wide[PARTS];
  for (int64_t g = 0; g < G; g++) {
    fetch((const char*)w + R * g * row / G * sizeof(W) + AHEAD, R * row / G * sizeof(W));
    for (int r = 0; r < R; r++) {
      read(w + r * row, pairs + 2 * r * G, g, wide);
      for (int i = 0; i < PARTS; i++) total[r][i % CHAINS] += wide[i] * get<floats>(x + g * WIDE + i * LANES);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int i = 1; i < CHAINS; i++) total[r][0] += total[r][i];
    y[r] = sum(total[r][0]);
  }
}

// R rows of W against V vectors of x's rows, x (K, V * LANES): a lane a row, so that nothing is summed across lanes.
template <int R, int V, typename W>
void rows_in_lanes(const W* w, int64_t row, const at::Half* pairs, const float* x, int64_t G, float (*y)[R]) {
  floats total[R][V] = {};
  for (int64_t g = 0; g < G; g++) {
    alignas(floats) float wide[R][WIDE];
    fetch((const char*)w + R * g * row / G * sizeof(W) + AHEAD, R * row / G * sizeof(W));
    for (int r = 0; r < R; r++) read(w + r * row, pairs + 2 * r * G, g, (floats*)wide[r]);
    for (int k = 0; k < WIDE; k++)
      for (int i = 0; i < V; i++) {
        const floats some = get<floats>(x + ((g * WIDE + k) * V + i) * LANES);
        for (int r = 0; r < R; r++) total[r][i] += some * wide[r][k];
      }
  }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < V * LANES; m++) y[m][r] = total[r][m / LANES][m % LANES];
}

template <typename W, typename Put>
void in_float32(const Layer& l, const float* x, int64_t M, const Put& put) {
  const W* w = (const W*)l.w.const_data_ptr();
  const int64_t row = l.bytes / sizeof(W), G = l.K / WIDE;
  auto by_lanes = [&]<int V>() {
    std::vector<float> turned(l.K * V * LANES);
    for (int64_t m = 0; m < M; m++)
      for (int64_t k = 0; k < l.K; k++) turned[k * V * LANES + m] = x[m * l.K + k];
    shares(l, [&](int64_t begin, int64_t end) {
      side_by_side<8 / V>(begin, end, [&]<int R>(int64_t n) {
        float y[V * LANES][R];
        rows_in_lanes<R, V>(w + n * row, row, l.pairs + 2 * n * G, turned.data(), G, y);
        for (int64_t m = 0; m < M; m++) put(m, n, y[m], R);
      });
    });
  };
  if (M > 1 && M <= LANES) return by_lanes.template operator()<1>();
  if (M > 1 && M <= 2 * LANES) return by_lanes.template operator()<2>();
  shares(l, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < M; m++)
      side_by_side<4>(begin, end, [&]<int R>(int64_t n) {
        float y[R];
        dots<R>(w + n * row, row, l.pairs + 2 * n * G, x + m * l.K, G, y);
        put(m, n, y, R);
      });
  });
}

// as the weights lie

#ifdef NATIVE

// Rows of x in W's type, as columns of `units` of 4 bytes, 2 bfloat16 or 4 int8. In bfloat16 a row is a column. To int8 it is two, all rows'
// high parts first, then the low: x is about step * (256 high + low), off by 1 / 65,024 of its largest at most.
struct Columns {
  int64_t count, units;
  std::vector<int32_t> data;      // (count, units)
  std::vector<float> step;        // (rows,)
  std::vector<int32_t> above;     // (count,): 128 times a column's sum, by which products with W's int8 + 128 are too large

  Columns(const float* x, int64_t M, int64_t K, bool int8) : count(int8 ? 2 * M : M), units(int8 ? K / 4 : K / 2), data(count * units) {
    if (!int8) {
      auto* to = (__m512bh*)data.data();
      for (int64_t i = 0; i < M * K; i += 32)
        _mm512_storeu_si512(to++, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
      return;
    }
    step.resize(M), above.resize(count);
    for (int64_t m = 0; m < M; m++) {
      const float* row = x + m * K;
      __m512 most = _mm512_set1_ps(1e-30f), zero = _mm512_setzero_ps();      // zero: but NaN is NaN, which max hides
      for (int64_t k = 0; k < K; k += 16) {
        const __m512 some = _mm512_loadu_ps(row + k);
        most = _mm512_max_ps(most, _mm512_abs_ps(some)), zero = _mm512_fmadd_ps(some, _mm512_setzero_ps(), zero);
      }
      step[m] = _mm512_reduce_max_ps(most) / 32512 + _mm512_reduce_add_ps(zero);      // 127 * 256
      const __m512 inverse = _mm512_set1_ps(1 / step[m]);
      auto *high = (int8_t*)&data[m * units], *low = (int8_t*)&data[(M + m) * units];
      __m512i highs = _mm512_setzero_si512(), lows = highs;
      for (int64_t k = 0; k < K; k += 16) {
        const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + k), inverse));
        const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8), l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, 8));
        _mm_storeu_si128((__m128i*)(high + k), _mm512_cvtepi32_epi8(h)), _mm_storeu_si128((__m128i*)(low + k), _mm512_cvtepi32_epi8(l));
        highs = _mm512_add_epi32(highs, h), lows = _mm512_add_epi32(lows, l);
      }
      above[m] = 128 * _mm512_reduce_add_epi32(highs), above[M + m] = 128 * _mm512_reduce_add_epi32(lows);
    }
  }
};

// R rows of W against M of x, from m on
template <int M, int R, bool INT8>
void native_dots(const char* w, int64_t bytes, const Columns& x, int64_t m, float (*y)[R]) {
  constexpr int PARTS_OF_X = INT8 ? 2 : 1;
  const int64_t low = x.count / 2;
  __m512 sums[PARTS_OF_X][M][R] = {};
  for (int64_t k = 0; k < bytes; k += 64) {
    __m512i wide[R];
    if (m == 0) fetch(w + R * k + AHEAD, R * 64);
    for (int r = 0; r < R; r++) {
      wide[r] = _mm512_loadu_si512(w + r * bytes + k);
      if (INT8) wide[r] = _mm512_xor_si512(wide[r], _mm512_set1_epi8(-128));      // + 128: one side of VNNI's product is unsigned
    }
    for (int p = 0; p < PARTS_OF_X; p++)
      for (int i = 0; i < M; i++) {
        const __m512i some = _mm512_loadu_si512((const char*)&x.data[(p * low + m + i) * x.units] + k);
        for (int r = 0; r < R; r++)
          sums[p][i][r] = INT8 ? (__m512)_mm512_dpbusd_epi32((__m512i)sums[p][i][r], wide[r], some)
                               : _mm512_dpbf16_ps(sums[p][i][r], (__m512bh)wide[r], (__m512bh)some);
      }
  }
  for (int i = 0; i < M; i++)
    for (int r = 0; r < R; r++)
      if constexpr (INT8) {
        auto part = [&](int p) { return float(_mm512_reduce_add_epi32((__m512i)sums[p][i][r]) - x.above[p * low + m + i]); };
        y[i][r] = x.step[m + i] * (256 * part(0) + part(1));
      } else {
        y[i][r] = _mm512_reduce_add_ps(sums[0][i][r]);
      }
}
#endif

#ifdef TILES
// W's tiles, 16 rows of 64 bytes, are read as they lie; x's are 16 units of up to 16 columns, in the registers 6 and 7. Two blocks of W at
// once, in 4 and 5; the products are 0 and 1, and 2 and 3 for the columns in 7: those from 16 on, or all low parts.

bool may_use_tiles() {      // a process asks the system, once
  static const bool may = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return may;
}

struct TileConfig {
  uint8_t palette = 1, start = 0, none[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig(int64_t columns, int64_t more) {
    for (int i : {0, 1, 6}) bytes[i] = 4 * columns, rows[i] = 16;
    for (int i : {2, 3, 7}) bytes[i] = 4 * more, rows[i] = more ? 16 : 0;
    for (int i : {4, 5}) bytes[i] = 64, rows[i] = 16;
  }
};

#define MULTIPLY(y, w, x) if constexpr (INT8) _tile_dpbssd(y, w, x); else _tile_dpbf16ps(y, w, x)

void turn(float (*y)[16]) {     // rows become columns: blocks of 8, of 4, of 2, of 1 change places
  floats rows[16];
  std::memcpy(rows, y, sizeof(rows));
  const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int s = 8; s; s /= 2) {
    const ints inside = (lane & s) == 0, low = inside ? lane : lane + 16 - s, high = inside ? lane + s : lane + 16;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
      if (!(i & s)) {
        const floats a = rows[i], b = rows[i + s];
        rows[i] = (floats)_mm512_permutex2var_ps((__m512)a, (__m512i)low, (__m512)b);
        rows[i + s] = (floats)_mm512_permutex2var_ps((__m512)a, (__m512i)high, (__m512)b);
      }
  }
  std::memcpy(y, rows, sizeof(rows));
}

// 32 rows of W (the last 16 may be the first again) against x's tiles -> out (columns / 16, 32, 16 or what columns are left)
template <bool INT8, bool MORE>
void tile_dots(const char* w, const char* v, int64_t bytes, const int32_t* x, const int32_t* more, const TileConfig& is, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (MORE) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < bytes; k += 64) {
    _tile_loadd(6, x + k / 16 * is.bytes[6], is.bytes[6]);
    fetch(w + 32 * k + AHEAD, 32 * 64);
    _tile_loadd(4, w + k, bytes);
    MULTIPLY(0, 4, 6);
    _tile_loadd(5, v + k, bytes);
    MULTIPLY(1, 5, 6);
    if constexpr (MORE) {
      _tile_loadd(7, more + k / 16 * is.bytes[7], is.bytes[7]);
      MULTIPLY(2, 4, 7);
      MULTIPLY(3, 5, 7);
    }
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
  if constexpr (MORE) {
    _tile_stored(2, out + 512, 64);
    _tile_stored(3, out + 768, 64);
  }
}
#endif

#ifdef NATIVE
template <bool INT8, typename Put>
void native(const Layer& l, const float* x, int64_t M, const Put& put) {
  const Columns columns(x, M, l.K, INT8);
  const char* w = (const char*)l.w.const_data_ptr();
  auto by_vectors = [&](int64_t begin, int64_t end) {
    side_by_side<4>(begin, end, [&]<int R>(int64_t n) {
      auto some = [&]<int m_>(int64_t m) {
        float y[m_][R];
        native_dots<m_, R, INT8>(w + n * l.bytes, l.bytes, columns, m, y);
        for (int i = 0; i < m_; i++) put(m + i, n, y[i], R);
      };
      int64_t m = 0;
      for (; m + 2 <= M; m += 2) some.template operator()<2>(m);
      if (m < M) some.template operator()<1>(m);
    });
  };
#ifdef TILES
  if (const int64_t C = columns.count, U = columns.units; M > 1 && M <= 16 && may_use_tiles()) {   // vectors read one row faster: 16.2 ms against 17.6 for 248 MB
    const int64_t first = C <= 16 ? C : INT8 ? M : 16, rest = C - first;
    const TileConfig config(first, rest);
    floats step = {};
    for (int64_t m = 0; INT8 && m < M; m++) step[m] = columns.step[m];
    std::vector<int32_t> tiled(C * U);                   // (units, the first columns), (units, the rest)
    for (int64_t some = 0; some < U; some += 16)
      for (int64_t c = 0; c < C; c++) {
        int32_t* to = c < first ? &tiled[some * first + c] : &tiled[first * U + some * rest + c - first];
        for (int64_t u = 0; u < 16; u++) to[u * (c < first ? first : rest)] = columns.data[c * U + some + u];
      }
    return shares(l, [&](int64_t begin, int64_t end) {
      float out[5 * 256], y[16][16];
      _tile_loadconfig(&config);
      for (int64_t n = begin; n + BLOCK <= end; n += 2 * BLOCK) {
        const char *one = w + n * l.bytes, *two = n + 2 * BLOCK <= end ? one + BLOCK * l.bytes : one;
        if (rest) tile_dots<INT8, true>(one, two, l.bytes, tiled.data(), &tiled[first * U], config, out);
        else tile_dots<INT8, false>(one, two, l.bytes, tiled.data(), nullptr, config, out);
        for (int half = 0; half < (two == one ? 1 : 2); half++) {
          for (int row = 0; row < 16; row++) {
            const float *high = out + half * 256 + row * 16, *low = high + (rest ? 512 : M);
            floats v = get<floats>(high);
            if (INT8) v = step * (256 * __builtin_convertvector((ints)v, floats) + __builtin_convertvector(get<ints>(low), floats));
            std::memcpy(y[row], &v, sizeof(v));
          }
          turn(y);
          for (int64_t m = 0; m < M; m++) put(m, n + half * BLOCK, y[m], BLOCK);
        }
      }
      _tile_release();
      by_vectors(end / BLOCK * BLOCK, end);
    });
  }
#endif
  shares(l, by_vectors);
}
#endif

// x (M, K) against a layer's W by the best way; half: x's numbers are bfloat16's
template <typename Put>
void product(const Layer& l, const float* x, bool half, int64_t M, const Put& put) {
  const auto type = l.w.scalar_type();
#ifdef NATIVE
  if (type == at::kBFloat16 && half && l.bytes % 64 == 0) return native<false>(l, x, M, put);
  if (type == at::kChar && l.bytes % 64 == 0) return native<true>(l, x, M, put);
#endif
  if (type == at::kFloat) in_float32<float>(l, x, M, put);
  else if (type == at::kBFloat16) in_float32<at::BFloat16>(l, x, M, put);
  else if (type == at::kChar) in_float32<int8_t>(l, x, M, put);
  else if (type == at::kByte) in_float32<uint8_t>(l, x, M, put);
  else TORCH_CHECK(false, "few_rows: weights of ", type);
}

// x (..., K), w (N, K) or (N, K / 2) bytes, K a multiple of 32, bias (N,) or none -> (..., N) as x; computed in float32, in int8's case with
// x in 16 bits
at::Tensor few_rows(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& bias) {
  const Layer l(w, scale, bias);
  TORCH_CHECK(x.size(-1) == l.K, "few_rows: W does not fit x");
  const bool half = x.scalar_type() == at::kBFloat16;
  const at::Tensor rows = x.to(at::kFloat).contiguous();
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = l.N;
  at::Tensor y = at::empty(sizes, half ? x.options() : rows.options());
  void* to = y.data_ptr();
  product(l, rows.const_data_ptr<float>(), half, rows.numel() / l.K, [&](int64_t m, int64_t n, float* v, int64_t count) {
    if (l.scale)
      for (int64_t i = 0; i < count; i++) v[i] *= l.scale[n + i];
    if (l.bias.data)
      for (int64_t i = 0; i < count; i++) v[i] += l.bias[n + i];
    if (half) std::copy(v, v + count, (at::BFloat16*)to + m * l.N + n);
    else std::copy(v, v + count, (float*)to + m * l.N + n);
  });
  return y.to(x.scalar_type());
}

// e^x for x <= 0, to 2 units of the last place: 2^n e^r with |r| <= ln 2 / 2, and Taylor's series for e^r; 0 below -87.
inline floats exponential(floats x) {
  const ints far = x < -87.0f;
  x = far ? floats{} - 87.0f : x;
  const ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
  const floats whole = __builtin_convertvector(n, floats), r = x - whole * 0.693359375f + whole * 2.12194440e-4f;   // ln 2 in two parts
  floats y = r * (1.0f / 5040) + 1.0f / 720;
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * r + factor;
  y = (floats)((ints)y + (n << 23));
  return far ? floats{} : y;
}

// rms: RMSNorm, else LayerNorm
at::Tensor normed(const at::Tensor& x, const std::optional<at::Tensor>& w, const std::optional<at::Tensor>& bias, double eps, bool rms) {
  const auto C = x.sym_sizes().slice(x.dim() - 1);
  return rms ? at::rms_norm_symint(x, C, w, eps) : at::layer_norm_symint(x, C, w, bias, eps);
}

// x (..., C) -> down(act(up(norm(x)))) as model.py's MLP has it; kind: swiglu, relu2, gelu or gelu_tanh
at::Tensor mlp(const at::Tensor& x, const std::optional<at::Tensor>& norm, const std::optional<at::Tensor>& norm_bias, double eps, bool rms,
               const std::string& kind, const at::Tensor& up, const std::optional<at::Tensor>& up_scale, const std::optional<at::Tensor>& up_bias,
               const at::Tensor& down, const std::optional<at::Tensor>& down_scale, const std::optional<at::Tensor>& down_bias) {
  at::Tensor h = few_rows(normed(x, norm, norm_bias, eps, rms), up, up_scale, up_bias);
  if (kind == "swiglu") {
    const auto both = h.chunk(2, -1);
    h = at::silu(both[0]).mul_(both[1]);
  } else if (kind == "relu2") {
    h = at::relu_(h).square_();
  } else {
    h = at::gelu_(h, kind == "gelu_tanh" ? "tanh" : "none");
  }
  return few_rows(h, down, down_scale, down_bias);
}

// R query heads (R, D) that share the S keys and values, of which `seen` (a number a key, added; or null) may hide some. scores: R rows of
// S numbers, and LANES more.
template <typename T>
void attended(const float* q, const T* k, const T* v, int64_t k_step, int64_t v_step, const float* seen, int64_t seen_step, int64_t R, int64_t S,
              int64_t D, float scale, float* scores, float* y) {
  constexpr int SIDE = 4;                   // vectors of the output at once
  const int64_t row = S + LANES, ahead = AHEAD / (D * sizeof(T));
  for (int64_t s = 0; s < S; s++) {
    if (s + ahead < S) fetch(k + (s + ahead) * k_step, D * sizeof(T));
    fetch(v + s * v_step, D * sizeof(T));
    for (int64_t r = 0; r < R; r++) {
      floats total = {};
      for (int64_t d = 0; d < D; d += LANES) total += lanes(k + s * k_step + d) * get<floats>(q + r * D + d);
      scores[r * row + s] = sum(total) * scale + (seen ? seen[r * seen_step + s] : 0);
    }
  }
  for (int64_t r = 0; r < R; r++) {
    float *w = scores + r * row, most = *std::max_element(w, w + S);
    std::fill(w + S, w + row, -INFINITY);
    floats total = {};
    for (int64_t s = 0; s < S; s += LANES) {
      const floats e = exponential(get<floats>(w + s) - most);
      std::memcpy(w + s, &e, sizeof(e));
      total += e;
    }
    const float inverse = 1 / sum(total);
    for (int64_t d = 0; d < D; d += SIDE * LANES) {
      const int64_t parts = std::min<int64_t>(SIDE, (D - d) / LANES);
      floats out[SIDE] = {};
      for (int64_t s = 0; s < S; s++) {
        const T* from = v + s * v_step + d;
        if (parts == SIDE)
          for (int i = 0; i < SIDE; i++) out[i] += lanes(from + i * LANES) * w[s];
        else
          for (int i = 0; i < parts; i++) out[i] += lanes(from + i * LANES) * w[s];
      }
      for (int i = 0; i < parts; i++) {
        out[i] *= inverse;
        std::memcpy(y + r * D + d + i * LANES, &out[i], sizeof(floats));
      }
    }
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
      std::vector<float> scores(R * (S + LANES));
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

// kept (B, G, slots, D)[b, :, slot[b, t]] = fresh (B, G, T, D)[b, :, t]
void write_slots(const at::Tensor& slot, const at::Tensor& kept, const at::Tensor& fresh) {
  const at::Tensor slots = slot.contiguous(), rows = fresh.stride(3) == 1 ? fresh : fresh.contiguous();
  const int64_t B = fresh.size(0), G = fresh.size(1), T = fresh.size(2), bytes = fresh.size(3) * fresh.element_size();
  TORCH_CHECK(kept.scalar_type() == fresh.scalar_type() && kept.stride(3) == 1 && slot.size(0) == B && slot.size(1) == T, "write_slots: types");
  TORCH_CHECK(kept.size(0) == B && kept.size(1) == G && kept.size(3) == fresh.size(3), "write_slots: shapes");
  const int64_t size = kept.element_size(), *at = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < B * T; i++) TORCH_CHECK_INDEX(at[i] >= 0 && at[i] < kept.size(2), "slot ", at[i], " of ", kept.size(2));
  char* to = (char*)kept.data_ptr();
  const char* from = (const char*)rows.const_data_ptr();
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++)
      for (int64_t g = 0; g < G; g++)
        std::memcpy(to + size * (b * kept.stride(0) + g * kept.stride(1) + at[b * T + t] * kept.stride(2)),
                    from + size * (b * rows.stride(0) + g * rows.stride(1) + t * rows.stride(2)), bytes);
}

// One token a row, x (B, 1, C) -> (B, 1, C), as mixers/attention.py has it: normed, projected to H queries, G keys and G values; queries and
// keys normalised where there are norms (D,), and their first channels turned by cos and sin (B or 1, 1, 1, half of them); key and value put
// into k and v (B, G, slots, D) at slot (B, 1); and the queries against the first keys, as many as the mask (B or 1, 1, 1, S) tells of.
at::Tensor attention(const at::Tensor& x, const std::optional<at::Tensor>& norm, const std::optional<at::Tensor>& norm_bias, double eps, bool rms,
                     const at::Tensor& qkv, const std::optional<at::Tensor>& qkv_scale, const std::optional<at::Tensor>& qkv_bias,
                     const at::Tensor& out, const std::optional<at::Tensor>& out_scale, const std::optional<at::Tensor>& out_bias,
                     const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm, double head_eps,
                     const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin, bool interleaved,
                     const at::Tensor& k, const at::Tensor& v, const at::Tensor& slot, const at::Tensor& mask) {
  const int64_t B = x.size(0), G = k.size(1), D = k.size(3), heads = qkv.size(0) / D, H = heads - 2 * G;
  const at::Tensor all = few_rows(normed(x, norm, norm_bias, eps, rms), qkv, qkv_scale, qkv_bias).view({B, heads, 1, D});
  const at::Tensor turned = all.narrow(1, 0, H + G).to(at::kFloat, false, true).contiguous();
  const Numbers q_weight(q_norm), k_weight(k_norm), c(cos), s(sin);
  const int64_t half = cos ? cos->size(3) : 0, by_row = cos && cos->size(0) > 1 ? half : 0;
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H + G; h++) {
      float* head = turned.data_ptr<float>() + (b * (H + G) + h) * D;
      if (const Numbers& weight = h < H ? q_weight : k_weight; weight.data) {
        double squares = 0;
        for (int64_t d = 0; d < D; d++) squares += head[d] * head[d];
        const float inverse = 1 / std::sqrt(squares / D + head_eps);
        for (int64_t d = 0; d < D; d++) head[d] *= inverse * weight[d];
      }
      for (int64_t i = 0; i < half; i++) {
        float &one = head[interleaved ? 2 * i : i], &two = head[interleaved ? 2 * i + 1 : i + half];
        const float a = one, b_ = two, cosine = c[b * by_row + i], sine = s[b * by_row + i];
        one = a * cosine - b_ * sine, two = b_ * cosine + a * sine;
      }
    }
  write_slots(slot, k, turned.narrow(1, H, G).to(k.scalar_type()));
  write_slots(slot, v, all.narrow(1, H + G, G));
  const int64_t S = mask.size(3);
  const at::Tensor y = one_query(turned.narrow(1, 0, H), k.narrow(2, 0, S), v.narrow(2, 0, S), mask, 1 / std::sqrt(double(D)));
  return few_rows(y.to(x.scalar_type()).view({B, 1, H * D}), out, out_scale, out_bias);
}

}  // namespace

TORCH_LIBRARY(heed, m) {
  m.def("few_rows(Tensor x, Tensor w, Tensor? scale, Tensor? bias) -> Tensor");
  m.def("mlp(Tensor x, Tensor? norm, Tensor? norm_bias, float eps, bool rms, str kind, Tensor up, Tensor? up_scale, Tensor? up_bias, "
        "Tensor down, Tensor? down_scale, Tensor? down_bias) -> Tensor");
  m.def("attention(Tensor x, Tensor? norm, Tensor? norm_bias, float eps, bool rms, Tensor qkv, Tensor? qkv_scale, Tensor? qkv_bias, "
        "Tensor out, Tensor? out_scale, Tensor? out_bias, Tensor? q_norm, Tensor? k_norm, float head_eps, Tensor? cos, Tensor? sin, "
        "bool interleaved, Tensor(a!) k, Tensor(b!) v, Tensor slot, Tensor mask) -> Tensor");
  m.def("one_query(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(heed, CPU, m) {
  m.impl("few_rows", few_rows);
  m.impl("mlp", mlp);
  m.impl("attention", attention);
  m.impl("one_query", one_query);
}
