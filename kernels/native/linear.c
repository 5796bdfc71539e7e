// Products with weights that stay in their own precision; arithmetic in float32.
//
// Every element of a result is one chain of fused multiply-adds in the order of the inputs, whatever the number of
// rows: a row's result does not depend on the batch around it, nor on the number of threads.
#include "panel.h"

enum {
    MAX_ROWS = 6,          // of a register tile of 2 vectors; up to 3 rows take 4 vectors
    MAX_DIRECT_ROWS = 96,  // above, widening the weights once for all rows is cheaper than once a tile
    MAX_DECODED_ROWS = 12,  // the same for quantised weights
    MAX_BLOCK_ROWS = 192,  // x of one block: in the second-level cache
    BLOCK_INPUTS = 256,    // widened weights of half a panel: in the first-level cache
    FETCH_AHEAD = 2048,    // bytes
};

// What to ask memory for on the way: so many bytes behind `at` with each input.
typedef struct {
    const char *at;
    long pace;
} ahead;

// `multiply_tile` over weights that are widened on the way, for whole columns of them.
INLINE void direct_tile(const float *x, long num_k, const char *weights, ahead next, float *y, long y_stride, const int rows,
                        const int first, const int width, const int format) {
    vf acc[6][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < width; j++) acc[r][j] = (vf){0};
    if (is_quantized(format)) {
        for (long k = 0; k < num_k; k += GROUP, weights += panel_bytes(GROUP, format)) {
            decoder with = load_decoder(weights, first, width, format);
            for (int i = 0; i < GROUP; i += 2) {
                __builtin_prefetch(next.at + (k + i) * next.pace);
                UNROLL for (int odd = 0; odd < 2; odd++) {
                    vf column[4];
                    decode_columns(weights, i, odd, &with, column, first, width, format);
                    multiply_add(acc, x + k + i + odd, num_k, column, rows, width);
                }
            }
        }
    } else {
        UNROLL_LOOP for (long k = 0; k < num_k; k++, weights += panel_bytes(1, format)) {
            vf column[4];
            __builtin_prefetch(next.at + k * next.pace);
            load_columns(weights, column, first, width, format);
            multiply_add(acc, x + k, num_k, column, rows, width);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < width; j++) store(y + r * y_stride + j * LANES, acc[r][j]);
}

// One panel for up to MAX_ROWS rows: in one pass for few, else half of its columns after the other.
INLINE void direct_rows(const float *x, long num_k, const char *weights, ahead next, float *y, long y_stride, int rows,
                        const int format) {
    ahead later = {next.at + num_k * next.pace, next.pace};
#define WHOLE(n) case n: direct_tile(x, num_k, weights, next, y, y_stride, n, 0, 4, format); break;
#define HALVES(n) case n: direct_tile(x, num_k, weights, next, y, y_stride, n, 0, 2, format); \
                          direct_tile(x, num_k, weights, later, y + 2 * LANES, y_stride, n, 2, 2, format); break;
    switch (rows) { WHOLE(1) WHOLE(2) WHOLE(3) HALVES(4) HALVES(5) HALVES(6) }
#undef WHOLE
#undef HALVES
}

static void direct_panel(const float *x, long num_k, const char *weights, ahead next, float *y, long y_stride, int rows,
                         int format) {
#define FORMAT(f) case f: direct_rows(x, num_k, weights, next, y, y_stride, rows, f); break;
    switch (format) { FORMAT(BATON_F32) FORMAT(BATON_BF16) FORMAT(BATON_F16) FORMAT(BATON_INT8) FORMAT(BATON_INT4) }
#undef FORMAT
}

// Half a panel's weights of `num_k` inputs as to[num_k][2 * LANES], in float32.
INLINE void widen_format(const char *weights, float *to, long num_k, const int first, const int format) {
    if (is_quantized(format)) {
        for (long k = 0; k < num_k; k += GROUP, weights += panel_bytes(GROUP, format)) {
            decoder with = load_decoder(weights, first, 2, format);
            for (int i = 0; i < GROUP; i += 2)
                UNROLL for (int odd = 0; odd < 2; odd++, to += 2 * LANES) {
                    vf column[4];
                    decode_columns(weights, i, odd, &with, column, first, 2, format);
                    store(to, column[0]);
                    store(to + LANES, column[1]);
                }
        }
        return;
    }
    for (long k = 0; k < num_k; k++, weights += panel_bytes(1, format), to += 2 * LANES) {
        vf column[4];
        load_columns(weights, column, first, 2, format);
        store(to, column[0]);
        store(to + LANES, column[1]);
    }
}

static void widen(const char *weights, float *to, long num_k, int half, int format) {
#define FORMAT(f) case f: if (half) widen_format(weights, to, num_k, 2, f); else widen_format(weights, to, num_k, 0, f); break;
    switch (format) { FORMAT(BATON_F32) FORMAT(BATON_BF16) FORMAT(BATON_F16) FORMAT(BATON_INT8) FORMAT(BATON_INT4) }
#undef FORMAT
}

INLINE void wide_tile(const float *x, long x_stride, const float *wide, long num_k, float *y, long y_stride,
                      int is_first, const int rows) {
    vf sums[6][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < 2; j++) sums[r][j] = is_first ? (vf){0} : load(y + r * y_stride + j * LANES);
    multiply_tile(x, x_stride, wide, 2 * LANES, num_k, sums, rows, 2);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < 2; j++) store(y + r * y_stride + j * LANES, sums[r][j]);
}

// Rows go through register tiles of about equal size: a last one of a row or two would leave the multipliers idle.
static void wide_rows(const float *x, long x_stride, const float *wide, long num_k, float *y, long y_stride,
                      int is_first, int64_t num_rows) {
    int64_t tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS, size = num_rows / tiles, larger = num_rows % tiles;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t rows = size + (tile < larger);
#define TILE(n) case n: wide_tile(x, x_stride, wide, num_k, y, y_stride, is_first, n); break;
        switch (rows) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
        x += rows * x_stride;
        y += rows * y_stride;
    }
}

// How to cut n into the fewest parts of at most `limit`, all about equal.
static int64_t even_part(int64_t n, int64_t limit) {
    int64_t parts = (n + limit - 1) / limit;
    return (n + parts - 1) / parts;
}

typedef struct {
    const baton_linear *linear;
    const float *x;
    float *y;
    int64_t num_rows;
    int64_t panels_at_once;
    atomic_long next;
} product;

// The panel's columns of y, or a stand-in where y ends inside the panel.
typedef struct {
    float *y;
    long stride;
    int64_t columns;
} target;

static target target_of(const product *job, int64_t first_row, int64_t panel, float *stand_in) {
    int64_t columns = job->linear->num_outputs - panel * PANEL;
    if (columns < PANEL) return (target){stand_in, PANEL, columns};
    return (target){job->y + first_row * job->linear->num_outputs + panel * PANEL, job->linear->num_outputs, PANEL};
}

static void finish(const product *job, target to, int64_t first_row, int64_t num_rows, int64_t panel) {
    const baton_linear *linear = job->linear;
    if (to.columns == PANEL && !linear->bias) return;
    for (int64_t r = 0; r < num_rows; r++) {
        float *y = job->y + (first_row + r) * linear->num_outputs + panel * PANEL;
        for (int64_t i = 0; i < to.columns; i++)
            y[i] = to.y[r * to.stride + i] + (linear->bias ? linear->bias[panel * PANEL + i] : 0.0f);
    }
}

static void few_rows(const product *job, int64_t begin, int64_t end, float *stand_in) {
    const baton_linear *linear = job->linear;
    int64_t num_k = linear->num_inputs, bytes = panel_bytes(num_k, linear->format);
    int64_t part = even_part(job->num_rows, MAX_ROWS);
    // A single pass reads memory itself. Several passes find their panel in the cache, and share in fetching the next one.
    int64_t passes = (job->num_rows + part - 1) / part * (part > 3 ? 2 : 1);
    ahead next = {.pace = bytes / num_k / passes};
    for (int64_t panel = begin; panel < end; panel++) {
        const char *weights = (const char *)linear->weights + panel * bytes;
        target to = target_of(job, 0, panel, stand_in);
        next.at = weights + (passes == 1 ? FETCH_AHEAD : bytes);
        for (int64_t row = 0; row < job->num_rows; row += part) {
            int64_t rows = job->num_rows - row < part ? job->num_rows - row : part;
            direct_panel(job->x + row * num_k, num_k, weights, next, to.y + row * to.stride, to.stride, (int)rows, linear->format);
            next.at += num_k * next.pace * (part > 3 ? 2 : 1);
        }
        finish(job, to, 0, job->num_rows, panel);
    }
}

static void many_rows(const product *job, int64_t first_row, int64_t num_rows, int64_t begin, int64_t end,
                      float *wide, float *stand_in) {
    const baton_linear *linear = job->linear;
    int64_t num_k = linear->num_inputs, bytes = panel_bytes(num_k, linear->format);
    int64_t part = (even_part(num_k, BLOCK_INPUTS) + GROUP - 1) / GROUP * GROUP;
    for (int64_t k = 0; k < num_k; k += part) {
        int64_t inputs = num_k - k < part ? num_k - k : part;
        for (int64_t panel = begin; panel < end; panel++) {
            target to = target_of(job, first_row, panel, stand_in);
            const char *weights = (const char *)linear->weights + panel * bytes + panel_bytes(k, linear->format);
            for (int half = 0; half < 2; half++) {
                widen(weights, wide, inputs, half, linear->format);
                wide_rows(job->x + first_row * num_k + k, num_k, wide, inputs, to.y + half * 2 * LANES, to.stride, k == 0,
                          num_rows);
            }
            if (k + inputs == num_k) finish(job, to, first_row, num_rows, panel);
        }
    }
}

static int64_t num_panels(const baton_linear *linear) { return (linear->num_outputs + PANEL - 1) / PANEL; }

static void multiply_panels(void *arg, void *scratch) {
    product *job = arg;
    float *wide = scratch, *stand_in = wide + BLOCK_INPUTS * 2 * LANES;  // the last panel alone uses the stand-in
    int is_direct = job->num_rows <= (is_quantized(job->linear->format) ? MAX_DECODED_ROWS : MAX_DIRECT_ROWS);
    int64_t begin, end;
    while (baton_take(&job->next, num_panels(job->linear), job->panels_at_once, &begin, &end)) {
        if (is_direct) {
            few_rows(job, begin, end, stand_in);
            continue;
        }
        int64_t part = even_part(job->num_rows, MAX_BLOCK_ROWS);
        for (int64_t row = 0; row < job->num_rows; row += part)
            many_rows(job, row, job->num_rows - row < part ? job->num_rows - row : part, begin, end, wide, stand_in);
    }
}

// y[num_rows, num_outputs] = x[num_rows, num_inputs] * W^T + bias.
void baton_multiply(baton_pool *pool, const baton_linear *linear, const float *x, float *y, int64_t num_rows) {
    if (num_rows == 0) return;
    int64_t panels = num_panels(linear), workers = baton_pool_size(pool);
    // Several pieces each, so that one that comes late or is slowed down does less of them.
    int64_t at_once = workers == 1 ? panels : (panels + 4 * workers - 1) / (4 * workers);
    product job = {linear, x, y, num_rows, at_once, 0};
    baton_run(pool, multiply_panels, &job, (panels + at_once - 1) / at_once);
}
