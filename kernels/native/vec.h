// Vectors of floats as the compiler's own types: one source for AVX2, AVX-512, NEON and plain SSE.
//
// Everything is compiled with FP contraction on and no other relaxation of IEEE arithmetic: `a += b * c` is one
// fused operation wherever the CPU has one, NaN and infinity keep their meaning.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")       // a loop of a constant length: away with it
#define UNROLL_LOOP _Pragma("GCC unroll 4")  // a long loop

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // at any address
typedef int16_t vh __attribute__((vector_size(4 * LANES)));  // two in each word
typedef int16_t vn __attribute__((vector_size(2 * LANES)));
typedef int16_t vn_any __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(2 * LANES)));
typedef int8_t vb_any __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf v) { *(vf_any *)p = v; }
INLINE vu load_words(const void *p) { return *(const vu_any *)p; }
INLINE vi load_bytes(const void *p) { return (vi)__builtin_convertvector((vb)*(const vb_any *)p, vh); }  // widened to 16 bits
INLINE void store_halves(int16_t *p, vi v) { *(vn_any *)p = __builtin_convertvector(v, vn); }  // of words that fit 16 bits
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

// Sum and maximum over the lanes, in every lane; always in the same order.
INLINE vf sum_lanes(vf v) {
#if LANES == 16
    v += SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v += SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif LANES == 8
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    v += SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    v += SHUFFLE(v, v, 2, 3, 0, 1);
    v += SHUFFLE(v, v, 1, 0, 3, 2);
#endif
    return v;
}

INLINE vf max_lanes(vf v) {
#if LANES == 16
    v = larger(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = larger(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = larger(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = larger(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif LANES == 8
    v = larger(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = larger(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    v = larger(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#else
    v = larger(v, SHUFFLE(v, v, 2, 3, 0, 1));
    v = larger(v, SHUFFLE(v, v, 1, 0, 3, 2));
#endif
    return v;
}

enum { ROUND = 0x4b400000 };  // 1.5 * 2^23 as a float: adding it leaves the nearest integer in the low bits

// The nearest integer, ties to even, of numbers below 2^22.
INLINE vi round_lanes(vf x) { return (vi)(x + 12582912.0f) - ROUND; }

// a * b, summed over the two 16-bit numbers in each word.
INLINE vi multiply_pairs(vi a, vi b) {
#if defined(__AVX2__)
    vi products;
    __asm__("vpmaddwd %2, %1, %0" : "=v"(products) : "v"(a), "v"(b));
    return products;
#else
    return ((vi)((vu)a << 16) >> 16) * ((vi)((vu)b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// sum += a * b, summed over the two 16-bit numbers in each word. Written out for x86: compilers make all products first
// and the sums afterwards, and run out of registers.
INLINE void add_products(vi *sum, vi a, vi b) {
#if defined(__AVX2__)
    vi products;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(*sum), "=&v"(products) : "v"(a), "v"(b));
#else
    *sum += multiply_pairs(a, b);
#endif
}

// 2 to the power x, relative error below 2e-7; exactly 0 below -126 (so for -inf), NaN for NaN.
INLINE vf exp2_lanes(vf x) {
    const float round = 12582912.0f;
    vf inside = pick(x < -126.0f, splat(-126.0f), pick(x > 127.0f, splat(127.0f), x));
    vf shifted = inside + round;
    vf f = inside - (shifted - round);  // [-0.5, 0.5]
    vf p = splat(1.535336188319500e-4f);  // Taylor of 2^f in the order of the minimax fit of Cephes' exp2f
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    vf scale = (vf)(((vu)shifted << 23) + (127u << 23));
    return pick(x < -126.0f, splat(0.0f), p * scale);
}

// silu(gate) * up.
INLINE vf gate_lanes(vf gate, vf up) { return gate / (1.0f + exp2_lanes(gate * -1.44269504f)) * up; }

// The two 16-bit numbers in each word, as floats. bfloat16 is the upper half of a float.
INLINE vf low_bf16(vu words) { return (vf)(words << 16); }
INLINE vf high_bf16(vu words) { return (vf)(words & 0xffff0000u); }

// float16 in the low half of each word. The exponent is moved by a multiplication, which also handles subnormals.
INLINE vf low_f16(vu words) {
    vu magnitude = (words & 0x7fffu) << 13;
    vf value = (vf)magnitude * 0x1p112f;
    vu is_special = (vu)(magnitude >= (0x7c00u << 13));  // infinity and NaN
    return (vf)(((vu)value | (is_special & 0x7f800000u)) | ((words & 0x8000u) << 16));
}
INLINE vf high_f16(vu words) { return low_f16(words >> 16); }

// Transposes LANES x LANES words in registers.
INLINE void transpose(vu rows[LANES]) {
    vu t[LANES];
#if LANES == 4
#define LOW32(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define HIGH32(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#define LOW64(a, b) SHUFFLE(a, b, 0, 1, 4, 5)
#define HIGH64(a, b) SHUFFLE(a, b, 2, 3, 6, 7)
#elif LANES == 8
#define LOW32(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH32(a, b) SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW64(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH64(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#else
#define LOW32(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH32(a, b) SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW64(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH64(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#endif
    // 4 x 4 inside each 128-bit part ...
    UNROLL for (int i = 0; i < LANES; i += 4) {
        vu ab_low = LOW32(rows[i], rows[i + 1]), ab_high = HIGH32(rows[i], rows[i + 1]);
        vu cd_low = LOW32(rows[i + 2], rows[i + 3]), cd_high = HIGH32(rows[i + 2], rows[i + 3]);
        t[i] = LOW64(ab_low, cd_low);
        t[i + 1] = HIGH64(ab_low, cd_low);
        t[i + 2] = LOW64(ab_high, cd_high);
        t[i + 3] = HIGH64(ab_high, cd_high);
    }
    // ... then the parts themselves.
#if LANES == 4
    UNROLL for (int i = 0; i < 4; i++) rows[i] = t[i];
#elif LANES == 8
    UNROLL for (int i = 0; i < 4; i++) {
        rows[i] = SHUFFLE(t[i], t[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        rows[i + 4] = SHUFFLE(t[i], t[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
#else
#define EVEN_PARTS(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD_PARTS(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
    UNROLL for (int i = 0; i < 4; i++) {
        vu even_01 = EVEN_PARTS(t[i], t[i + 4]), odd_01 = ODD_PARTS(t[i], t[i + 4]);
        vu even_23 = EVEN_PARTS(t[i + 8], t[i + 12]), odd_23 = ODD_PARTS(t[i + 8], t[i + 12]);
        rows[i] = EVEN_PARTS(even_01, even_23);
        rows[i + 4] = EVEN_PARTS(odd_01, odd_23);
        rows[i + 8] = ODD_PARTS(even_01, even_23);
        rows[i + 12] = ODD_PARTS(odd_01, odd_23);
    }
#endif
}

// acc[r][j] += factor[r] * column[j], with whichever there is less of kept in registers.
INLINE void multiply_add(vf acc[6][4], const float *factors, long stride, const vf column[4], const int rows, const int width) {
    if (rows < width) {
        vf factor[6];
        UNROLL for (int r = 0; r < rows; r++) factor[r] = splat(factors[r * stride]);
        UNROLL for (int j = 0; j < width; j++) UNROLL for (int r = 0; r < rows; r++) acc[r][j] += factor[r] * column[j];
    } else {
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < width; j++) acc[r][j] += factors[r * stride] * column[j];
    }
}

// One register tile of a matrix product: sums[r][:] += x[r][:] * w for `rows` rows and `width` vectors of columns.
// `rows` and `width` are constants where this is inlined; they choose registers, never the order of additions:
// every element is one chain of fused multiply-adds in the order of k.
INLINE void multiply_tile(const float *x, long x_stride, const float *w, long w_stride, long num_k, vf sums[6][4],
                          const int rows, const int width) {
    vf acc[6][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < width; j++) acc[r][j] = sums[r][j];
    UNROLL_LOOP for (long k = 0; k < num_k; k++, w += w_stride) {
        vf column[4];
        UNROLL for (int j = 0; j < width; j++) column[j] = load(w + j * LANES);
        multiply_add(acc, x + k, x_stride, column, rows, width);
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < width; j++) sums[r][j] = acc[r][j];
}
