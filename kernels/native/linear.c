// Products with weights, in float32 or in integers; see panel.h for the weights.
//
// A row's result does not depend on the batch around it, nor on the number of threads. In float32 every element is one
// chain of fused multiply-adds in the order of the inputs. In integers a group of inputs is added up exactly, whatever the
// order; the groups' sums, times their scales, are one such chain again.
#include "panel.h"

enum {
    MAX_ROWS = 6,            // of a register tile
    MAX_BLOCK_ROWS = 192,    // whose part of x stays in the second-level cache
    MAX_PART_BYTES = 20480,  // of a panel, in the first-level cache while all rows pass
    FETCH_AHEAD = 2048,      // bytes
    STEP = 8,                // inputs of a row's that lie together; one word of int4
};

// How rows are cut into register tiles of about equal size: a last one of a row or two would leave the multipliers idle.
typedef struct {
    int64_t count, size;
    int64_t num_larger;  // the first ones, of a row more
} tiling;

static tiling tiles_of(int64_t num_rows) {
    int64_t count = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    return (tiling){count, num_rows / count, num_rows % count};
}

// Rows as a product reads them: float32, or integers with a scale for each X_GROUP of them. The integers lie tile after
// tile in the order of use, so that one pointer walks through them.
typedef struct {
    const float *floats;   // [row][num_inputs]
    int16_t *codes;        // [tile][padded / STEP][row][STEP]
    float *scales;         // [tile][padded / X_GROUP][row]
    float *sums;           // [tile][padded / GROUP][row]: what they add up to, for int4's minimum
    int64_t padded;        // inputs
} operand;

typedef struct {
    const baton_linear *linear;
    operand x;
    float *y;
    float *highest;  // [panel][row]: its highest output, infinity where one is NaN; null: nobody asks
    int64_t num_rows;
    int64_t part;  // inputs that are multiplied before the next panel is turned to
    int64_t panels_at_once;
    atomic_long next;
} product;

// A group of x as integers. What is not finite makes the whole row NaN.
INLINE void encode_group(const float *x, int16_t *codes, float *scale, float *sums) {
    vi magnitude = {0};
    UNROLL for (int i = 0; i < X_GROUP; i += LANES) {
        vi bits = (vi)load(x + i) & 0x7fffffff;
        magnitude = (vi)pick(bits > magnitude, (vf)bits, (vf)magnitude);  // bits are ordered as numbers are, NaN last
    }
    int32_t most = 0;
    for (int i = 0; i < LANES; i++) most = magnitude[i] > most ? magnitude[i] : most;
    float largest, inverse = 0.0f;
    memcpy(&largest, &most, sizeof largest);
    vi keep = (vi){0} + (most < 0x7f800000 ? -1 : 0);
    if (largest >= 1e-30f && keep[0]) inverse = MAX_X_CODE / largest;
    *scale = !keep[0] ? NAN : inverse > 0.0f ? largest / MAX_X_CODE : 0.0f;
    UNROLL for (int half = 0; half < X_GROUP / GROUP; half++) {
        vi sum = {0};
        UNROLL for (int i = half * GROUP; i < (half + 1) * GROUP; i += LANES) {
            vi code = round_lanes((vf)((vi)load(x + i) & keep) * inverse);
            sum += code;
            store_halves(codes + i, code);
        }
        sums[half] = sum_lanes(__builtin_convertvector(sum, vf))[0] * *scale;
    }
}

typedef struct {
    const float *x;
    const operand *to;
    int64_t num_rows, num_inputs;
    atomic_long next;
} encoding;

static void encode_row(const encoding *job, int64_t first, int64_t r, int64_t rows) {
    const operand *to = job->to;
    for (int64_t k = 0; k < job->num_inputs; k += X_GROUP) {
        const float *x = job->x + (first + r) * job->num_inputs + k;
        float last[X_GROUP] = {0}, scale, sums[X_GROUP / GROUP];
        int16_t codes[X_GROUP];
        int64_t missing = k + X_GROUP - job->num_inputs;
        if (missing > 0) x = memcpy(last, x, (size_t)(X_GROUP - missing) * sizeof *x);
        encode_group(x, codes, &scale, sums);
        int16_t *place = to->codes + first * to->padded + k * rows + r * STEP;
        UNROLL for (int i = 0; i < X_GROUP; i += STEP) memcpy(place + i * rows, codes + i, STEP * sizeof *codes);
        to->scales[(first * to->padded + k * rows) / X_GROUP + r] = scale;
        UNROLL for (int i = 0; i < X_GROUP / GROUP; i++) to->sums[(first * to->padded + k * rows) / GROUP + i * rows + r] = sums[i];
    }
}

static void encode_rows(void *arg, void *scratch) {
    (void)scratch;
    encoding *job = arg;
    tiling tiles = tiles_of(job->num_rows);
    for (int64_t tile, end; baton_take(&job->next, tiles.count, 1, &tile, &end);) {
        int64_t rows = tiles.size + (tile < tiles.num_larger);
        int64_t first = tile * tiles.size + (tile < tiles.num_larger ? tile : tiles.num_larger);
        for (int64_t r = 0; r < rows; r++) encode_row(job, first, r, rows);
    }
}

// What to ask memory for on the way: so many bytes behind `at` with each input.
typedef struct {
    const char *at;
    int64_t pace;
} ahead;

// Asks for what `count` inputs from input `k` on stand for.
INLINE void fetch(ahead next, int64_t k, int64_t count) {
    for (int64_t i = 0; i < count * next.pace; i += 64) __builtin_prefetch(next.at + k * next.pace + i);
}

// A register tile: `rows` rows by the outputs of a panel. `rows` and `format` are constants where tiles are inlined.
typedef struct {
    vf sums[MAX_ROWS][2];
} tile;

// sums[r] += x[r][:] * weights, for `num_k` inputs from input `k` on.
INLINE void float_tile(tile *to, const float *x, int64_t stride, int64_t num_k, const char *weights, ahead next, const int rows,
                       const int format) {
    vf acc[MAX_ROWS][2];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < 2; j++) acc[r][j] = to->sums[r][j];
    for (int64_t begin = 0; begin < num_k; begin += X_GROUP) {
        int64_t end = begin + X_GROUP < num_k ? begin + X_GROUP : num_k;
        fetch(next, begin, end - begin);
        UNROLL_LOOP for (int64_t k = begin; k < end; k++, weights += input_bytes(1, format)) {
            vf column[2];
            load_column(weights, column, format);
            UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < 2; j++) acc[r][j] += x[r * stride + k] * column[j];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < 2; j++) to->sums[r][j] = acc[r][j];
}

// acc[r] of STEP inputs, added to what it is or, where they are the first, instead of it.
INLINE void add_step(vi acc[MAX_ROWS][2], const int16_t *x, const char *codes, const int are_first, const int rows, const int format) {
    UNROLL for (int pair = 0; pair < STEP / 2; pair++) {
        vi column[2];
        UNROLL for (int j = 0; j < 2; j++) column[j] = load_codes(codes, pair, j, format);
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, x + r * STEP + pair * 2, sizeof both);
            UNROLL for (int j = 0; j < 2; j++)
                if (are_first && pair == 0) acc[r][j] = multiply_pairs(column[j], (vi){0} + both);
                else add_products(&acc[r][j], column[j], (vi){0} + both);
        }
    }
}

// The same in integers.
INLINE void integer_tile(tile *to, const operand *x, int64_t row, int64_t begin, int64_t num_k, const char *weights, ahead next,
                         const int rows, const int format) {
    const int block = format == BATON_INT16 ? X_GROUP : GROUP;
    const int64_t at = row * x->padded + begin * rows;
    const int16_t *codes_of_x = x->codes + at;
    const float *scales = x->scales + at / X_GROUP, *sums = x->sums + at / GROUP;
    for (int64_t k = 0; k < num_k; k += block, weights += input_bytes(block, format)) {
        const char *codes = codes_of(weights, format);
        vi acc[MAX_ROWS][2];
        fetch(next, k, block);
        add_step(acc, codes_of_x, codes, 1, rows, format);
        for (int i = STEP; i < block; i += STEP)
            add_step(acc, codes_of_x + i * rows, codes + i * code_bytes(format), 0, rows, format);
        codes_of_x += block * rows;
        UNROLL for (int j = 0; j < 2; j++) {
            vf scale = format == BATON_INT16 ? splat(1.0f) : load((const float *)weights + j * LANES);
            vf least = format == BATON_INT4 ? load((const float *)weights + PANEL + j * LANES) : splat(0.0f);
            UNROLL for (int r = 0; r < rows; r++) {
                vf sum = __builtin_convertvector(acc[r][j], vf);
                if (format != BATON_INT16) sum *= scale;
                to->sums[r][j] += sum * scales[r];
                if (format == BATON_INT4) to->sums[r][j] += least * sums[r];
            }
        }
        if ((k + block) % X_GROUP == 0) scales += rows;
        sums += rows;
    }
}

// Inputs [k, k + num_k) of one panel for rows [row, row + rows), added to y where they are not the first.
INLINE void panel_tile(const product *job, const char *panel, int64_t row, int64_t k, int64_t num_k, ahead next, float *y,
                       int64_t y_stride, const int rows, const int format) {
    tile sums;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < 2; j++) sums.sums[r][j] = k ? load(y + r * y_stride + j * LANES) : splat(0.0f);
    const char *weights = panel + head_bytes(format) + input_bytes(k, format);
    int64_t num_inputs = job->linear->num_inputs;
    if (is_float(format)) float_tile(&sums, job->x.floats + row * num_inputs + k, num_inputs, num_k, weights, next, rows, format);
    else integer_tile(&sums, &job->x, row, k, num_k, weights, next, rows, format);
    int is_scaled = format == BATON_INT16 && k + num_k >= num_inputs;
    UNROLL for (int j = 0; j < 2; j++) {
        vf scale = is_scaled ? load((const float *)panel + j * LANES) : splat(1.0f);
        UNROLL for (int r = 0; r < rows; r++) store(y + r * y_stride + j * LANES, sums.sums[r][j] * scale);
    }
}

// How to cut n into the fewest parts of at most `limit`, all about equal.
static int64_t even_part(int64_t n, int64_t limit) {
    int64_t parts = (n + limit - 1) / limit;
    return (n + parts - 1) / parts;
}

// The same for all rows.
INLINE void panel_rows(const product *job, int64_t number, int64_t k, int64_t num_k, float *y, int64_t y_stride, const int format) {
    int64_t bytes = panel_bytes(job->linear->num_inputs, format);
    const char *panel = (const char *)job->linear->weights + number * bytes;
    tiling tiles = tiles_of(job->num_rows);
    // A single pass reads memory itself. Several passes find their panel in the cache, and share in fetching the next one.
    ahead next = {.pace = (input_bytes(GROUP, format) / GROUP + tiles.count - 1) / tiles.count};
    next.at = panel + input_bytes(k, format) + (tiles.count == 1 ? FETCH_AHEAD : bytes);
    for (int64_t tile = 0, row = 0, rows; tile < tiles.count; tile++, row += rows, next.at += num_k * next.pace) {
        rows = tiles.size + (tile < tiles.num_larger);
#define TILE(n) case n: panel_tile(job, panel, row, k, num_k, next, y + row * y_stride, y_stride, n, format); break;
        switch (rows) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
    }
}

// The highest of a panel's outputs, and infinity where one is NaN.
INLINE float highest_of(const float *y, int64_t columns) {
    float outputs[PANEL];
    for (int64_t i = columns; i < PANEL; i++) outputs[i] = -INFINITY;
    if (columns < PANEL) y = memcpy(outputs, y, (size_t)columns * sizeof *y);
    vf a = load(y), b = load(y + LANES);
    return max_lanes(pick((a == a) & (b == b), larger(a, b), splat(INFINITY)))[0];
}

// A finished panel's outputs, with their bias or gated, from where they were added up to where they belong.
static void put(const product *job, int64_t panel, int64_t columns, const float *sums, int64_t stride, float *y) {
    const baton_linear *linear = job->linear;
    int64_t first = panel * panel_columns(linear), y_stride = num_columns(linear);
    float bias[PANEL] = {0}, values[PANEL];
    for (int64_t i = 0; linear->bias && i < columns; i++) {
        bias[i] = linear->bias[first + i];
        if (linear->is_gated) bias[LANES + i] = linear->bias[y_stride + first + i];
    }
    vf low = load(bias), high = load(bias + LANES);
    for (int64_t r = 0; r < job->num_rows; r++, sums += stride, y += y_stride) {
        vf a = load(sums) + low, b = load(sums + LANES) + high;
        if (linear->is_gated) a = gate_lanes(a, b);
        if (columns == LANES) {
            store(y, a);
            continue;
        }
        store(values, a);
        store(values + LANES, b);
        memcpy(y, values, (size_t)columns * sizeof *y);
    }
}

static void multiply_panel(const product *job, int64_t panel, int64_t k, int64_t num_k, float *stand_in) {
    const baton_linear *linear = job->linear;
    int64_t stride = num_columns(linear), first = panel * panel_columns(linear), columns = stride - first;
    float *y = job->y + first, *target = y;
    if (columns > panel_columns(linear)) columns = panel_columns(linear);
    if (columns < PANEL) {  // where y ends inside the panel, or has one value for two outputs
        target = stand_in;
        stride = PANEL;
    }
#define FORMAT(f) case f: panel_rows(job, panel, k, num_k, target, stride, f); break;
    switch (linear->format) {
        FORMAT(BATON_F32) FORMAT(BATON_BF16) FORMAT(BATON_F16)
        FORMAT(BATON_INT16) FORMAT(BATON_INT8) FORMAT(BATON_INT4)
    }
#undef FORMAT
    if (k + num_k < linear->num_inputs) return;
    if (target != y || linear->bias) put(job, panel, columns, target, stride, y);
    if (job->highest)
        for (int64_t r = 0; r < job->num_rows; r++)
            job->highest[panel * job->num_rows + r] = highest_of(y + r * num_columns(linear), columns);
}

static void multiply_panels(void *arg, void *scratch) {
    product *job = arg;
    int64_t num_k = stored_inputs(job->linear->num_inputs, job->linear->format);
    for (int64_t begin, end; baton_take(&job->next, num_panels(job->linear), job->panels_at_once, &begin, &end);)
        for (int64_t panel = begin; panel < end; panel++)
            for (int64_t k = 0; k < num_k; k += job->part)
                multiply_panel(job, panel, k, job->part < num_k - k ? job->part : num_k - k, scratch);
}

// The operand's integers in memory of the pool's; false: there is none.
static int encode(baton_pool *pool, const float *x, int64_t num_rows, int64_t num_inputs, operand *to) {
    to->padded = padded_inputs(num_inputs);
    int64_t num_scales = to->padded / X_GROUP, num_sums = to->padded / GROUP;
    float *memory = baton_pool_memory(pool, BATON_OPERAND, num_rows * (to->padded * 2 + (num_scales + num_sums) * 4));
    if (!memory) return 0;
    to->scales = memory;
    to->sums = to->scales + num_rows * num_scales;
    to->codes = (int16_t *)(to->sums + num_rows * num_sums);
    encoding job = {x, to, num_rows, num_inputs, 0};
    baton_run(pool, encode_rows, &job, num_rows / MAX_ROWS);
    return 1;
}

// Which output of each row is the highest, the first of equal ones; a NaN is higher than any.
static void find_best(const product *job, int32_t *best) {
    const baton_linear *linear = job->linear;
    float highest[MAX_BLOCK_ROWS];
    for (int64_t r = 0; r < job->num_rows; r++) {
        highest[r] = job->highest[r];
        best[r] = 0;
    }
    for (int32_t first = PANEL; first < linear->num_outputs; first += PANEL) {
        const float *panel = job->highest + first / PANEL * job->num_rows;
        for (int64_t r = 0; r < job->num_rows; r++) {
            best[r] = panel[r] > highest[r] ? first : best[r];
            highest[r] = panel[r] > highest[r] ? panel[r] : highest[r];
        }
    }
    for (int64_t r = 0; r < job->num_rows; r++)
        while (job->y[r * linear->num_outputs + best[r]] < highest[r]) best[r]++;
}

// y[num_rows, num_outputs, or half of them] = x[num_rows, num_inputs] * W^T + bias, gated or not. Where `best` is not null,
// and the product not gated, also which output of each row is the highest: the first of equal ones; a NaN before any.
// Returns 0, or -1 when there is no memory for the work.
int baton_multiply(baton_pool *pool, const baton_linear *linear, const float *x, float *y, int64_t num_rows, int32_t *best) {
    int64_t panels = num_panels(linear), workers = baton_pool_size(pool);
    // Several pieces each, so that one that comes late or is slowed down does less of them.
    int64_t at_once = workers == 1 ? panels : (panels + 4 * workers - 1) / (4 * workers);
    int64_t block = num_rows ? even_part(num_rows, MAX_BLOCK_ROWS) : 1;
    float *highest = best ? baton_pool_memory(pool, BATON_HIGHEST, block * panels * (int64_t)sizeof *highest) : NULL;
    if (best && !highest) return -1;
    int failed = 0;
    for (int64_t row = 0; row < num_rows; row += block) {
        product job = {.linear = linear, .y = y + row * num_columns(linear), .highest = highest, .panels_at_once = at_once};
        const float *rows = x + row * linear->num_inputs;
        job.num_rows = block < num_rows - row ? block : num_rows - row;
        if (is_float(linear->format)) job.x = (operand){.floats = rows, .padded = linear->num_inputs};
        else failed = !encode(pool, rows, job.num_rows, linear->num_inputs, &job.x);
        if (failed) break;
        // A single tile passes once, so nothing has to stay in the cache for the next.
        int64_t num_k = job.x.padded, limit = MAX_PART_BYTES * GROUP / input_bytes(GROUP, linear->format);
        job.part = job.num_rows <= MAX_ROWS ? num_k : (even_part(num_k, limit) + X_GROUP - 1) / X_GROUP * X_GROUP;
        baton_run(pool, multiply_panels, &job, (panels + at_once - 1) / at_once);
        if (best) find_best(&job, best + row);
    }
    return -failed;
}
