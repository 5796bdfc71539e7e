// Row-wise operations. Each row is widened to float32, computed, and rounded once on its way out.
#include "baton.h"
#include "vec.h"

enum { ROWS_AT_ONCE = 8 };  // that a thread takes: below, sharing them costs more than they do

int64_t baton_dtype_bytes(int dtype) { return dtype == BATON_F32 ? 4 : 2; }

static float f16_to_float(uint16_t bits) {
    uint32_t magnitude = (uint32_t)(bits & 0x7fff) << 13;
    union { uint32_t u; float f; } value = {magnitude};
    value.f *= 0x1p112f;
    if (magnitude >= (0x7c00u << 13)) value.u |= 0x7f800000u;
    value.u |= (uint32_t)(bits & 0x8000) << 16;
    return value.f;
}

// Rounds to nearest, ties to even.
static uint16_t float_to_bf16(float x) {
    union { float f; uint32_t u; } value = {x};
    uint32_t rounded = (value.u + 0x7fff + ((value.u >> 16) & 1)) >> 16;
    uint32_t quiet_nan = (value.u >> 16) | 0x40;
    return (uint16_t)(x == x ? rounded : quiet_nan);
}

static uint16_t float_to_f16(float x) {
    union { float f; uint32_t u; } value = {x}, magic = {.u = 0};
    uint32_t sign = (value.u >> 16) & 0x8000, magnitude = value.u & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to beyond 65504: infinity
    if (magnitude < 0x38800000) {
        // Subnormal: an addition aligns the bits and rounds them.
        magic.u = 0x3f000000;
        value.u = magnitude;
        value.f += magic.f;
        return (uint16_t)(sign | (value.u - magic.u));
    }
    uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23);
    return (uint16_t)(sign | (rounded >> 13));
}

void baton_load_row(float *to, const void *from, int64_t n, int dtype) {
    const uint16_t *narrow = from;
    switch (dtype) {
        case BATON_F32: memcpy(to, from, (size_t)n * sizeof *to); break;
        case BATON_BF16:
            for (int64_t i = 0; i < n; i++) {
                uint32_t bits = (uint32_t)narrow[i] << 16;
                memcpy(to + i, &bits, sizeof bits);
            }
            break;
        case BATON_F16:
            for (int64_t i = 0; i < n; i++) to[i] = f16_to_float(narrow[i]);
            break;
    }
}

void baton_store_row(void *to, const float *from, int64_t n, int dtype) {
    uint16_t *narrow = to;
    switch (dtype) {
        case BATON_F32: memcpy(to, from, (size_t)n * sizeof *from); break;
        case BATON_BF16:
            for (int64_t i = 0; i < n; i++) narrow[i] = float_to_bf16(from[i]);
            break;
        case BATON_F16:
            for (int64_t i = 0; i < n; i++) narrow[i] = float_to_f16(from[i]);
            break;
    }
}

// to = x / sqrt(mean(x^2) + eps) * weight; `to` may be `x`.
void baton_norm_row(float *to, const float *x, const float *weight, int64_t n, float eps) {
    vf squares[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        vf a = load(x + i), b = load(x + i + LANES);
        squares[0] += a * a;
        squares[1] += b * b;
    }
    float sum = sum_lanes(squares[0] + squares[1])[0];
    for (; i < n; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (i = 0; i < n; i++) to[i] = x[i] * scale * weight[i];
}

typedef struct {
    float *x;
    const void *delta;
    const float *weight;
    float eps;
    void *out;
    int64_t num_rows, dim;
    int dtype;
    atomic_long next;
} norm_job;

static void norm_rows(void *arg, void *scratch) {
    norm_job *job = arg;
    int64_t row_bytes = job->dim * baton_dtype_bytes(job->dtype);
    float *wide = scratch;
    for (int64_t row = 0, end = 0; row < end || baton_take(&job->next, job->num_rows, ROWS_AT_ONCE, &row, &end); row++) {
        float *x = job->x + row * job->dim;
        if (job->delta) {
            const float *delta = wide;
            const char *from = (const char *)job->delta + row * row_bytes;
            if (job->dtype == BATON_F32) delta = (const float *)from;
            else baton_load_row(wide, from, job->dim, job->dtype);
            for (int64_t i = 0; i < job->dim; i++) x[i] += delta[i];
        }
        if (!job->out) continue;
        char *to = (char *)job->out + row * row_bytes;
        float *normed = job->dtype == BATON_F32 ? (float *)to : wide;
        baton_norm_row(normed, x, job->weight, job->dim, job->eps);
        if (normed == wide) baton_store_row(to, wide, job->dim, job->dtype);
    }
}

// x += delta (where there is one); out = the norm of x (where it is asked for). x is float32, the others `dtype`.
void baton_rms_norm(baton_pool *pool, float *x, const void *delta, const float *weight, float eps, void *out,
                    int64_t num_rows, int64_t dim, int dtype) {
    norm_job job = {x, delta, weight, eps, out, num_rows, dim, dtype, 0};
    baton_run(pool, norm_rows, &job, num_rows / ROWS_AT_ONCE);
}

typedef struct {
    const void *gate_up;
    void *out;
    int64_t num_rows, dim;
    int dtype;
    atomic_long next;
} silu_job;

static void silu_row(float *to, const float *gate, const float *up, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, gate_lanes(load(gate + i), load(up + i)));
    if (i < n) {
        // The tail through the same vector code, so that an element's value does not depend on its place.
        float g[LANES] = {0}, u[LANES] = {0}, out[LANES];
        memcpy(g, gate + i, (size_t)(n - i) * sizeof *g);
        memcpy(u, up + i, (size_t)(n - i) * sizeof *u);
        store(out, gate_lanes(load(g), load(u)));
        memcpy(to + i, out, (size_t)(n - i) * sizeof *to);
    }
}

static void silu_rows(void *arg, void *scratch) {
    silu_job *job = arg;
    int64_t dim = job->dim, bytes = baton_dtype_bytes(job->dtype);
    float *wide = scratch;
    for (int64_t row = 0, end = 0; row < end || baton_take(&job->next, job->num_rows, ROWS_AT_ONCE, &row, &end); row++) {
        const char *from = (const char *)job->gate_up + 2 * row * dim * bytes;
        char *to = (char *)job->out + row * dim * bytes;
        if (job->dtype == BATON_F32) {
            silu_row((float *)to, (const float *)from, (const float *)from + dim, dim);
            continue;
        }
        // In pieces: a row of any length, a scratch of one size.
        enum { PIECE = 4096 };
        for (int64_t at = 0; at < dim; at += PIECE) {
            int64_t n = dim - at < PIECE ? dim - at : PIECE;
            baton_load_row(wide, from + at * bytes, n, job->dtype);
            baton_load_row(wide + PIECE, from + (dim + at) * bytes, n, job->dtype);
            silu_row(wide, wide, wide + PIECE, n);
            baton_store_row(to + at * bytes, wide, n, job->dtype);
        }
    }
}

// out[r] = silu(gate[r]) * up[r]; gate_up: [num_rows, 2 * dim], gate first.
void baton_silu_mul(baton_pool *pool, const void *gate_up, void *out, int64_t num_rows, int64_t dim, int dtype) {
    silu_job job = {gate_up, out, num_rows, dim, dtype, 0};
    baton_run(pool, silu_rows, &job, num_rows / ROWS_AT_ONCE);
}
