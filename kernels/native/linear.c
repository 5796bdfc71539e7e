// Products with weights that stay in their own precision; arithmetic in float32.
//
// Weights lie in panels of PANEL outputs, inside a panel input after input, so that a product reads memory once, in
// order. 16-bit weights lie in pairs: a word holds two outputs LANES apart, which one shift and one mask widen.
//
// Every element of a result is one chain of fused multiply-adds in the order of the inputs, whatever the number of
// rows: a row's result does not depend on the batch around it, nor on the number of threads.
#include "baton.h"
#include "vec.h"

enum {
    PANEL = 4 * LANES,
    MAX_ROWS = 6,          // of a register tile of 2 vectors; up to 3 rows take 4 vectors
    MAX_DIRECT_ROWS = 96,  // above, widening the weights once for all rows is cheaper than once a tile
    MAX_BLOCK_ROWS = 192,  // x of one block: in the second-level cache
    FETCH_AHEAD = 2048,    // bytes
    BLOCK_INPUTS = 256,    // widened weights of half a panel: in the first-level cache
};

static int64_t num_panels(int64_t num_outputs) { return (num_outputs + PANEL - 1) / PANEL; }

int64_t baton_packed_bytes(int64_t num_outputs, int64_t num_inputs, int dtype) {
    return num_panels(num_outputs) * PANEL * num_inputs * baton_dtype_bytes(dtype);
}

// Where output `column` of a panel lies in one input's PANEL elements.
static int64_t place_of(int64_t column, int dtype) {
    if (dtype == BATON_F32) return column;
    int64_t half = column / (2 * LANES), inside = column % (2 * LANES);
    return half * 2 * LANES + inside % LANES * 2 + inside / LANES;
}

// Puts rows [num_rows, num_inputs] of a weight matrix in as outputs first_row, first_row + 1, ... `packed` starts as zeros.
void baton_pack(void *packed, const void *rows, int64_t num_rows, int64_t first_row, int64_t num_inputs, int dtype) {
    enum { INPUTS_AT_ONCE = 64 };  // so that the rows of a panel meet in the cache
    for (int64_t row = 0; row < num_rows;) {
        int64_t column = (first_row + row) % PANEL, panel = (first_row + row) / PANEL;
        int64_t n = PANEL - column < num_rows - row ? PANEL - column : num_rows - row;
        for (int64_t begin = 0; begin < num_inputs; begin += INPUTS_AT_ONCE) {
            int64_t end = begin + INPUTS_AT_ONCE < num_inputs ? begin + INPUTS_AT_ONCE : num_inputs;
            for (int64_t i = 0; i < n; i++) {
                int64_t to = panel * PANEL * num_inputs + place_of(column + i, dtype), from = (row + i) * num_inputs;
                if (dtype == BATON_F32)
                    for (int64_t k = begin; k < end; k++)
                        ((uint32_t *)packed)[to + k * PANEL] = ((const uint32_t *)rows)[from + k];
                else
                    for (int64_t k = begin; k < end; k++)
                        ((uint16_t *)packed)[to + k * PANEL] = ((const uint16_t *)rows)[from + k];
            }
        }
        row += n;
    }
}

// One row of the weight matrix in float32: an embedding looked up in the head.
void baton_unpack_row(const baton_linear *linear, int64_t row, float *to) {
    int64_t bytes = baton_dtype_bytes(linear->dtype);
    const char *from = linear->weights;
    from += (row / PANEL * PANEL * linear->num_inputs + place_of(row % PANEL, linear->dtype)) * bytes;
    for (int64_t k = 0; k < linear->num_inputs; k++) baton_load_row(to + k, from + k * PANEL * bytes, 1, linear->dtype);
}

// The weights of one input for `width` vectors of outputs.
INLINE void load_columns(const char *weights, vf column[4], const int width, const int dtype) {
    UNROLL for (int j = 0; j < width; j += 2) {
        if (dtype == BATON_F32) {
            column[j] = load((const float *)weights + j * LANES);
            column[j + 1] = load((const float *)weights + (j + 1) * LANES);
        } else {
            vu words = load_words(weights + j / 2 * LANES * 4);
            column[j] = dtype == BATON_BF16 ? low_bf16(words) : low_f16(words);
            column[j + 1] = dtype == BATON_BF16 ? high_bf16(words) : high_f16(words);
        }
    }
}

// What to ask memory for on the way: so many bytes behind `at` with each input.
typedef struct {
    const char *at;
    long pace;
} ahead;

// `multiply_tile` over weights that are widened on the way, for whole columns of them.
INLINE void direct_tile(const float *x, long num_k, const char *weights, ahead next, float *y, long y_stride, const int rows,
                        const int width, const int dtype) {
    const long step = PANEL * (dtype == BATON_F32 ? 4 : 2);
    vf acc[6][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < width; j++) acc[r][j] = (vf){0};
    UNROLL_LOOP for (long k = 0; k < num_k; k++, weights += step) {
        vf column[4];
        __builtin_prefetch(next.at + k * next.pace);
        load_columns(weights, column, width, dtype);
        multiply_add(acc, x + k, num_k, column, rows, width);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < width; j++) store(y + r * y_stride + j * LANES, acc[r][j]);
}

// One panel for up to MAX_ROWS rows: in one pass for few, else half of its columns after the other.
INLINE void direct_rows(const float *x, long num_k, const char *weights, ahead next, float *y, long y_stride, int rows,
                        const int dtype) {
    const char *half = weights + 2 * LANES * (dtype == BATON_F32 ? 4 : 2);
    ahead later = {next.at + num_k * next.pace, next.pace};
#define WHOLE(n) case n: direct_tile(x, num_k, weights, next, y, y_stride, n, 4, dtype); break;
#define HALVES(n) case n: direct_tile(x, num_k, weights, next, y, y_stride, n, 2, dtype); \
                          direct_tile(x, num_k, half, later, y + 2 * LANES, y_stride, n, 2, dtype); break;
    switch (rows) { WHOLE(1) WHOLE(2) WHOLE(3) HALVES(4) HALVES(5) HALVES(6) }
#undef WHOLE
#undef HALVES
}

static void direct_panel(const float *x, long num_k, const char *weights, ahead next, float *y, long y_stride, int rows,
                         int dtype) {
    switch (dtype) {
        case BATON_F32: direct_rows(x, num_k, weights, next, y, y_stride, rows, BATON_F32); break;
        case BATON_BF16: direct_rows(x, num_k, weights, next, y, y_stride, rows, BATON_BF16); break;
        case BATON_F16: direct_rows(x, num_k, weights, next, y, y_stride, rows, BATON_F16); break;
    }
}

static void widen(const char *weights, float *to, long num_k, int dtype) {
    const long step = PANEL * (dtype == BATON_F32 ? 4 : 2);
    for (long k = 0; k < num_k; k++, weights += step, to += 2 * LANES) {
        vf column[4];
        switch (dtype) {
            case BATON_F32: load_columns(weights, column, 2, BATON_F32); break;
            case BATON_BF16: load_columns(weights, column, 2, BATON_BF16); break;
            default: load_columns(weights, column, 2, BATON_F16); break;
        }
        store(to, column[0]);
        store(to + LANES, column[1]);
    }
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
    int64_t num_k = linear->num_inputs, panel_bytes = PANEL * num_k * baton_dtype_bytes(linear->dtype);
    int64_t part = even_part(job->num_rows, MAX_ROWS);
    // A single pass reads memory itself. Several passes find their panel in the cache, and share in fetching the next one.
    int64_t step = panel_bytes / num_k, passes = (job->num_rows + part - 1) / part * (part > 3 ? 2 : 1);
    ahead next = {.pace = step / passes};
    for (int64_t panel = begin; panel < end; panel++) {
        const char *weights = (const char *)linear->weights + panel * panel_bytes;
        target to = target_of(job, 0, panel, stand_in);
        next.at = weights + (passes == 1 ? FETCH_AHEAD : panel_bytes);
        for (int64_t row = 0; row < job->num_rows; row += part) {
            int64_t rows = job->num_rows - row < part ? job->num_rows - row : part;
            direct_panel(job->x + row * num_k, num_k, weights, next, to.y + row * to.stride, to.stride, (int)rows, linear->dtype);
            next.at += num_k * next.pace * (part > 3 ? 2 : 1);
        }
        finish(job, to, 0, job->num_rows, panel);
    }
}

static void many_rows(const product *job, int64_t first_row, int64_t num_rows, int64_t begin, int64_t end,
                      float *wide, float *stand_in) {
    const baton_linear *linear = job->linear;
    int64_t num_k = linear->num_inputs, bytes = baton_dtype_bytes(linear->dtype);
    int64_t part = even_part(num_k, BLOCK_INPUTS);
    for (int64_t k = 0; k < num_k; k += part) {
        int64_t inputs = num_k - k < part ? num_k - k : part;
        for (int64_t panel = begin; panel < end; panel++) {
            target to = target_of(job, first_row, panel, stand_in);
            const char *weights = (const char *)linear->weights + PANEL * (panel * num_k + k) * bytes;
            for (int half = 0; half < 2; half++) {
                widen(weights + half * 2 * LANES * bytes, wide, inputs, linear->dtype);
                wide_rows(job->x + first_row * num_k + k, num_k, wide, inputs, to.y + half * 2 * LANES, to.stride, k == 0,
                          num_rows);
            }
            if (k + inputs == num_k) finish(job, to, first_row, num_rows, panel);
        }
    }
}

static void multiply_panels(void *arg, int worker, int num_workers, void *scratch) {
    const product *job = arg;
    int64_t panels = num_panels(job->linear->num_outputs);
    int64_t begin = panels * worker / num_workers, end = panels * (worker + 1) / num_workers;
    float *wide = scratch, *stand_in = wide + BLOCK_INPUTS * 2 * LANES;  // the last panel alone uses the stand-in
    if (job->num_rows <= MAX_DIRECT_ROWS) {
        few_rows(job, begin, end, stand_in);
        return;
    }
    int64_t part = even_part(job->num_rows, MAX_BLOCK_ROWS);
    for (int64_t row = 0; row < job->num_rows; row += part) {
        int64_t rows = job->num_rows - row < part ? job->num_rows - row : part;
        many_rows(job, row, rows, begin, end, wide, stand_in);
    }
}

// y[num_rows, num_outputs] = x[num_rows, num_inputs] * W^T + bias.
void baton_multiply(baton_pool *pool, const baton_linear *linear, const float *x, float *y, int64_t num_rows) {
    product job = {linear, x, y, num_rows};
    baton_run(pool, multiply_panels, &job);
}
