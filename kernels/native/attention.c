// Attention over the paged cache, in place: no block is gathered.
//
// Keys and values are read in spans of SPAN positions counted from position 0, widened once for all queries that look
// at the span, and folded into a running softmax (FlashAttention-2, Dao, 2023). A query's additions happen in the
// order of positions, in spans that do not depend on who else is computed: a token gives the same bits alone, in a
// chunk of any length, and in any batch. A key outside a query's range is never multiplied, so what unused slots
// hold (NaN included) cannot reach a result.
#include "baton.h"
#include "vec.h"

enum {
    SPAN = 32,           // positions; whole pairs of vectors
    MAX_TILE_ROWS = 96,  // (query, head) pairs that share one pass over the keys
    TILE = 6,            // rows of a register tile
    MAX_HEAD_DIM = 512,
};

// The scratch of one worker, by the floats it needs for heads of `dim`, padded to whole vectors.
typedef struct {
    float *keys;     // [dim][SPAN]
    float *values;   // [SPAN][padded]
    float *queries;  // [row][dim], scaled
    float *sums;     // [row][padded]
    float *weights;  // [TILE][SPAN]
    float *max, *total;  // [row]
    int64_t dim, padded;
} tile_memory;

// A little apart, or all of it would fall on the same sets of the cache.
enum { GAP = 48, MAX_FLOATS = 2 * (MAX_TILE_ROWS + SPAN) * MAX_HEAD_DIM + (TILE + 2) * SPAN + 2 * MAX_TILE_ROWS + 8 * GAP };
_Static_assert(MAX_FLOATS * sizeof(float) <= BATON_SCRATCH_BYTES, "a tile fits a worker's scratch");

static tile_memory lay_out(void *scratch, int64_t dim, int64_t rows) {
    int64_t padded = (dim + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    tile_memory memory = {.dim = dim, .padded = padded, .keys = scratch};
    memory.values = memory.keys + (dim + 1) * SPAN + GAP;  // the keys' last row may be overrun by less than a vector
    memory.queries = memory.values + SPAN * padded + GAP;
    memory.sums = memory.queries + rows * dim + GAP;
    memory.weights = memory.sums + rows * padded + GAP;
    memory.max = memory.weights + TILE * SPAN + GAP;
    memory.total = memory.max + rows;
    return memory;
}

int baton_can_attend(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
    return head_dim <= MAX_HEAD_DIM && num_heads / num_kv_heads <= MAX_TILE_ROWS;
}

typedef struct {
    const baton_model *model;
    const baton_batch *batch;
    int64_t layer;
    char *qkv;
    char *out;
    int dtype;
    atomic_long next;  // tile to be taken
} attention;

// One layer's keys of one head in one sequence. Its values lie `values_at` bytes behind.
typedef struct {
    const char *base;
    const int32_t *table;
    int64_t block_bytes;  // between blocks of the cache
    int64_t block_shift;  // log2 of the tokens in one
    int64_t row_bytes;
    int64_t values_at;
} head_cache;

static const char *row_at(const head_cache *cache, int64_t position) {
    int64_t offset = position & ((1 << cache->block_shift) - 1);
    return cache->base + cache->table[position >> cache->block_shift] * cache->block_bytes + offset * cache->row_bytes;
}

static head_cache head_cache_of(const attention *job, int64_t sequence, int64_t kv_head) {
    const baton_model *model = job->model;
    const baton_batch *batch = job->batch;
    int64_t row_bytes = model->head_dim * baton_dtype_bytes(batch->cache_dtype);
    int64_t head_bytes = batch->block_tokens * row_bytes, values_at = model->num_kv_heads * head_bytes;
    return (head_cache){
        .base = (const char *)batch->cache + job->layer * 2 * values_at + kv_head * head_bytes,
        .table = batch->tables + batch->first_block[sequence],
        .block_bytes = model->num_layers * 2 * values_at,
        .block_shift = __builtin_ctzll((unsigned long long)batch->block_tokens),
        .row_bytes = row_bytes,
        .values_at = values_at,
    };
}

// Where the keys of positions [low, high) of a span are; behind `high`, the last of them again.
typedef struct {
    int64_t begin, low, high;  // the latter two relative to `begin`
    const char *rows[SPAN];
} span_rows;

static span_rows find_rows(const head_cache *cache, int64_t begin, int64_t oldest, int64_t end) {
    span_rows span = {.begin = begin, .low = begin < oldest ? oldest - begin : 0, .high = end - begin};
    if (span.high > SPAN) span.high = SPAN;
    int64_t inside_block = (1 << cache->block_shift) - 1;
    for (int64_t i = span.low; i < span.high; i++) {
        int is_next = i > span.low && (begin + i) & inside_block;
        span.rows[i] = is_next ? span.rows[i - 1] + cache->row_bytes : row_at(cache, begin + i);
    }
    for (int64_t i = span.high; i < SPAN; i++) span.rows[i] = span.rows[span.high - 1];
    return span;
}

// Two vectors of a row's elements. Those of 16 bits come out even ones first: that order is as good as any for values.
INLINE void load_pair(const void *row, int64_t at, vf pair[2], const int dtype) {
    if (dtype == BATON_F32) {
        pair[0] = load((const float *)row + at);
        pair[1] = load((const float *)row + at + LANES);
    } else {
        vu words = load_words((const uint16_t *)row + at);
        pair[0] = dtype == BATON_BF16 ? low_bf16(words) : low_f16(words);
        pair[1] = dtype == BATON_BF16 ? high_bf16(words) : high_f16(words);
    }
}

// Where element d of a row lies after `load_pair`.
static int64_t place_of(int64_t d, int dtype) {
    if (dtype == BATON_F32) return d;
    int64_t inside = d % (2 * LANES);
    return d - inside + inside % 2 * LANES + inside / 2;
}

// A row of such elements in order, times `scale`.
static void put_in_order(const float *row, int64_t padded, float scale, float *to, int dtype) {
    for (int64_t d = 0; d < padded; d += 2 * LANES)
        for (int64_t i = 0; i < LANES; i++) {
            to[d + (dtype == BATON_F32 ? i : 2 * i)] = row[d + i] * scale;
            to[d + (dtype == BATON_F32 ? LANES + i : 2 * i + 1)] = row[d + LANES + i] * scale;
        }
}

// Keys of the span as to[dim][SPAN], in float32; columns outside its range mean nothing.
INLINE void transpose_keys(const span_rows *span, int64_t dim, float *to, const int dtype) {
    const int per_word = dtype == BATON_F32 ? 1 : 2;
    for (int64_t first = span->low; first < span->high; first += LANES) {
        const char *rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = span->rows[first + i < SPAN ? first + i : SPAN - 1];
        int64_t d = 0;
        for (; d + LANES * per_word <= dim; d += LANES * per_word) {
            vu words[LANES];
            UNROLL for (int i = 0; i < LANES; i++) words[i] = load_words(rows[i] + d / per_word * 4);
            transpose(words);
            UNROLL for (int i = 0; i < LANES; i++) {
                float *at = to + (d + i * per_word) * SPAN + first;
                if (dtype == BATON_F32) {
                    store(at, (vf)words[i]);
                } else {
                    store(at, dtype == BATON_BF16 ? low_bf16(words[i]) : low_f16(words[i]));
                    store(at + SPAN, dtype == BATON_BF16 ? high_bf16(words[i]) : high_f16(words[i]));
                }
            }
        }
        for (; d < dim; d++)
            for (int i = 0; i < LANES; i++)
                baton_load_row(to + d * SPAN + first + i, rows[i] + d * baton_dtype_bytes(dtype), 1, dtype);
    }
}

static void load_keys(const span_rows *span, tile_memory *memory, int dtype) {
    switch (dtype) {
        case BATON_F32: transpose_keys(span, memory->dim, memory->keys, BATON_F32); break;
        case BATON_BF16: transpose_keys(span, memory->dim, memory->keys, BATON_BF16); break;
        case BATON_F16: transpose_keys(span, memory->dim, memory->keys, BATON_F16); break;
    }
}

INLINE void widen_values(const span_rows *span, int64_t values_at, tile_memory *memory, const int dtype) {
    for (int64_t i = span->low; i < span->high; i++) {
        const char *row = span->rows[i] + values_at;
        float *to = memory->values + i * memory->padded;
        int64_t d = 0;
        for (; d + 2 * LANES <= memory->dim; d += 2 * LANES) {
            vf pair[2];
            load_pair(row, d, pair, dtype);
            store(to + d, pair[0]);
            store(to + d + LANES, pair[1]);
        }
        for (; d < memory->dim; d++)
            baton_load_row(to + place_of(d, dtype), row + d * baton_dtype_bytes(dtype), 1, dtype);
    }
}

static void load_values(const span_rows *span, int64_t values_at, tile_memory *memory, int dtype) {
    switch (dtype) {
        case BATON_F32: widen_values(span, values_at, memory, BATON_F32); break;
        case BATON_BF16: widen_values(span, values_at, memory, BATON_BF16); break;
        case BATON_F16: widen_values(span, values_at, memory, BATON_F16); break;
    }
}

// Scores of `rows` queries against the span, in base 2.
INLINE void score_tile(const float *queries, int64_t dim, const float *keys, float *scores, int64_t high, const int rows,
                       const int width) {
    for (int at = 0; at < high; at += width * LANES) {
        vf sums[TILE][4];
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < width; j++) sums[r][j] = (vf){0};
        multiply_tile(queries, dim, keys + at, SPAN, dim, sums, rows, width);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < width; j++) store(scores + r * SPAN + at + j * LANES, sums[r][j]);
    }
}

// Scores of keys [low, high) become weights relative to the new maximum, all others 0; decay: by how much everything
// before shrinks.
INLINE void soften(float *scores, int64_t low, int64_t high, float *max, float *total, float *decay, const int rows) {
    float now[TILE];
    UNROLL for (int r = 0; r < rows; r++) {
        float *row = scores + r * SPAN;
        if (low > 0 || high < SPAN)
            for (int64_t i = 0; i < SPAN; i++)
                if (i < low || i >= high) row[i] = -INFINITY;
        vf largest = load(row);
        for (int i = LANES; i < SPAN; i += LANES) largest = larger(largest, load(row + i));
        largest = max_lanes(largest);
        now[r] = largest[0] > max[r] ? largest[0] : max[r];
        decay[r] = max[r] - now[r];
        max[r] = now[r];
    }
    for (int r = 0; r < rows; r += LANES) store(decay + r, exp2_lanes(load(decay + r)));
    UNROLL for (int r = 0; r < rows; r++) {
        float *row = scores + r * SPAN;
        vf sum = {0};
        for (int i = 0; i < SPAN; i += LANES) {
            vf weight = exp2_lanes(load(row + i) - now[r]);
            store(row + i, weight);
            sum += weight;
        }
        total[r] = total[r] * decay[r] + sum_lanes(sum)[0];
    }
}

// sums = sums * decay + weights * values of keys [low, high), as widened before.
INLINE void value_tile(const tile_memory *memory, float *sums_at, int64_t low, int64_t high, const float *decay,
                       const int rows, const int width) {
    int64_t padded = memory->padded;
    for (int64_t d = 0; d < padded; d += width * LANES) {
        vf sums[TILE][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < width; j++) sums[r][j] = load(sums_at + r * padded + d + j * LANES) * decay[r];
        multiply_tile(memory->weights + low, SPAN, memory->values + low * padded + d, padded, high - low, sums, rows, width);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < width; j++) store(sums_at + r * padded + d + j * LANES, sums[r][j]);
    }
}

// The same straight from the cache: for few rows, widening first would cost more than the product. Such rows wait for
// memory more than they compute, so what `next` will read is asked for on the way.
INLINE void cached_value_tile(const tile_memory *memory, const span_rows *span, const span_rows *next, int64_t values_at,
                              float *sums_at, int64_t low, int64_t high, const float *decay, const int rows,
                              const int width, const int dtype) {
    const int bytes = dtype == BATON_F32 ? 4 : 2;
    int64_t padded = memory->padded;
    for (int64_t d = 0; d < padded; d += width * LANES) {
        vf sums[TILE][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < width; j++) sums[r][j] = load(sums_at + r * padded + d + j * LANES) * decay[r];
        int is_new_line = d * bytes % 64 == 0;
        for (int64_t i = low; i < high; i++) {
            vf column[4];
            if (is_new_line) {
                __builtin_prefetch(next->rows[i] + d * bytes);
                __builtin_prefetch(next->rows[i] + values_at + d * bytes);
            }
            UNROLL for (int j = 0; j < width; j += 2) load_pair(span->rows[i] + values_at, d + j * LANES, column + j, dtype);
            multiply_add(sums, memory->weights + i, SPAN, column, rows, width);
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < width; j++) store(sums_at + r * padded + d + j * LANES, sums[r][j]);
    }
}

// Where the values come from: the widened ones, or rows of the cache of a dtype.
enum { WIDENED = -1 };

// Folds keys [low, high) of the loaded span into rows [first, first + rows) of the tile.
INLINE void fold_tile(tile_memory *memory, const span_rows *span, const span_rows *next, int64_t values_at, int64_t first,
                      int64_t low, int64_t high, const int rows, const int source) {
    const int score_width = rows <= 3 && SPAN % (4 * LANES) == 0 ? 4 : 2;
    float decay[TILE + LANES] = {0};
    score_tile(memory->queries + first * memory->dim, memory->dim, memory->keys, memory->weights, high, rows, score_width);
    soften(memory->weights, low, high, memory->max + first, memory->total + first, decay, rows);
    float *sums = memory->sums + first * memory->padded;
    const int is_wide = rows <= 3 && memory->padded % (4 * LANES) == 0;
    if (source != WIDENED) cached_value_tile(memory, span, next, values_at, sums, low, high, decay, rows, 2, source);
    else if (is_wide) value_tile(memory, sums, low, high, decay, rows, 4);
    else value_tile(memory, sums, low, high, decay, rows, 2);
}

INLINE void fold_rows(tile_memory *memory, const span_rows *span, const span_rows *next, int64_t values_at, int64_t begin, int64_t end,
                      int64_t low, int64_t high, const int source) {
    for (int64_t row = begin; row < end; row += TILE) {
#define ROWS(n) case n: fold_tile(memory, span, next, values_at, row, low, high, n, source); break;
        switch (end - row) {
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5)
            default: fold_tile(memory, span, next, values_at, row, low, high, TILE, source);
        }
#undef ROWS
    }
}

static void fold(tile_memory *memory, const span_rows *span, const span_rows *next, int64_t values_at, int64_t begin, int64_t end, int64_t low,
                 int64_t high, int source) {
    switch (source) {
        case WIDENED: fold_rows(memory, span, next, values_at, begin, end, low, high, WIDENED); break;
        case BATON_F32: fold_rows(memory, span, next, values_at, begin, end, low, high, BATON_F32); break;
        case BATON_BF16: fold_rows(memory, span, next, values_at, begin, end, low, high, BATON_BF16); break;
        case BATON_F16: fold_rows(memory, span, next, values_at, begin, end, low, high, BATON_F16); break;
    }
}

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// All heads that share `kv_head`, for the queries at positions [begin, end) of a sequence.
static void attend_tile(const attention *job, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end,
                        void *scratch) {
    const baton_model *model = job->model;
    const baton_batch *batch = job->batch;
    int64_t dim = model->head_dim, group = model->num_heads / model->num_kv_heads, num_rows = (end - begin) * group;
    int64_t window = model->layers[job->layer].window, bytes = baton_dtype_bytes(job->dtype);
    int64_t qkv_bytes = (model->num_heads + 2 * model->num_kv_heads) * dim * bytes;
    int64_t first_token = batch->first_row[sequence] + begin - batch->start[sequence];
    tile_memory memory = lay_out(scratch, dim, num_rows);
    float scale = 1.44269504f / sqrtf((float)dim);  // exp(x) = 2^(x * log2(e))

    for (int64_t row = 0; row < num_rows; row++) {
        float *query = memory.queries + row * dim;
        int64_t head = kv_head * group + row % group;
        baton_load_row(query, job->qkv + (first_token + row / group) * qkv_bytes + head * dim * bytes, dim, job->dtype);
        for (int64_t d = 0; d < dim; d++) query[d] *= scale;
        memory.max[row] = -INFINITY;
        memory.total[row] = 0.0f;
    }
    memset(memory.sums, 0, (size_t)(num_rows * memory.padded) * sizeof(float));
    int source = num_rows <= TILE && memory.padded == dim ? batch->cache_dtype : WIDENED;
    if (memory.padded > dim) memset(memory.values, 0, (size_t)(SPAN * memory.padded) * sizeof(float));

    head_cache cache = head_cache_of(job, sequence, kv_head);
    // Slots before `oldest`, the first the first query sees, may belong to nobody any more; those from `end` on are unused.
    int64_t oldest = window && begin + 1 > window ? begin + 1 - window : 0;
    span_rows spans[2];
    spans[0] = find_rows(&cache, oldest / SPAN * SPAN, oldest, end);
    for (int64_t number = 0, at = spans[0].begin; at < end; number++, at += SPAN) {
        span_rows *span = &spans[number % 2], *next = &spans[(number + 1) % 2];
        *next = at + SPAN < end ? find_rows(&cache, at + SPAN, oldest, end) : *span;
        load_keys(span, &memory, batch->cache_dtype);
        if (source == WIDENED) load_values(span, cache.values_at, &memory, batch->cache_dtype);
        if (at + SPAN <= begin + 1 && (!window || at > end - 1 - window)) {
            fold(&memory, span, next, cache.values_at, 0, num_rows, 0, SPAN, source);
            continue;
        }
        for (int64_t position = begin; position < end; position++) {
            int64_t from = window ? max64(at, position + 1 - window) : at, to = min64(at + SPAN, position + 1);
            if (from >= to) continue;
            fold(&memory, span, next, cache.values_at, (position - begin) * group, (position - begin + 1) * group, from - at,
                 to - at, source);
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
        float *sums = memory.sums + row * memory.padded, scale_back = 1.0f / memory.total[row];
        int64_t token = first_token + row / group, head = kv_head * group + row % group;
        float *ordered = memory.queries + row * dim;  // not needed any more, nor are those behind it
        put_in_order(sums, memory.padded, scale_back, ordered, batch->cache_dtype);
        baton_store_row(job->out + (token * model->num_heads + head) * dim * bytes, ordered, dim, job->dtype);
    }
}

// Queries in one tile: whole spans where they fit, so that only the last span of a tile is masked.
static int64_t tile_queries(const baton_model *model) {
    return max64(1, min64(SPAN, MAX_TILE_ROWS / (model->num_heads / model->num_kv_heads)));
}

// Whether any token of [begin, end) is an output.
static int has_output(const baton_batch *batch, int64_t begin, int64_t end) {
    int64_t low = 0, high = batch->num_outputs;  // the first output from `begin` on lies between them
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (batch->outputs[middle] < begin) low = middle + 1;
        else high = middle;
    }
    return low < batch->num_outputs && batch->outputs[low] < end;
}

static void attend_tiles(void *arg, void *scratch) {
    attention *job = arg;
    const baton_batch *batch = job->batch;
    int64_t num_kv_heads = job->model->num_kv_heads, step = tile_queries(job->model);
    int64_t tile = 0, mine = atomic_fetch_add(&job->next, 1);
    int is_last = job->layer == job->model->num_layers - 1;  // whose other rows nothing depends on
    for (int64_t sequence = 0; sequence < batch->num_sequences; sequence++) {
        int64_t start = batch->start[sequence];
        int64_t stop = start + batch->first_row[sequence + 1] - batch->first_row[sequence];
        for (int64_t begin = start; begin < stop; begin = min64(stop, (begin / step + 1) * step))
            for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++, tile++) {
                if (tile != mine) continue;
                int64_t end = min64(stop, (begin / step + 1) * step), token = batch->first_row[sequence] - start;
                if (!is_last || has_output(batch, token + begin, token + end)) attend_tile(job, sequence, kv_head, begin, end, scratch);
                mine = atomic_fetch_add(&job->next, 1);
            }
    }
}

static void rotate(float *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float first = head[i], second = head[half + i];
        head[i] = first * cos[i] - second * sin[i];
        head[half + i] = second * cos[i] + first * sin[i];
    }
}

// Norms and rotates q and k of every token, and stores k and v in the token's slot.
static void place_sequences(void *arg, void *scratch) {
    attention *job = arg;
    const baton_model *model = job->model;
    const baton_batch *batch = job->batch;
    const baton_layer *layer = &model->layers[job->layer];
    int64_t dim = model->head_dim, bytes = baton_dtype_bytes(job->dtype);
    int64_t num_kv_heads = model->num_kv_heads, rotated = model->num_heads + num_kv_heads;
    float *wide = scratch;
    int64_t sequence, end;
    while (baton_take(&job->next, batch->num_sequences, 1, &sequence, &end))
        for (int64_t token = batch->first_row[sequence]; token < batch->first_row[sequence + 1]; token++) {
            int64_t position = batch->start[sequence] + token - batch->first_row[sequence];
            int64_t angles = (batch->has_token_angles ? token : position) * model->rotary_half;
            for (int64_t head = 0; head < rotated + num_kv_heads; head++) {
                char *at = job->qkv + (token * (rotated + num_kv_heads) + head) * dim * bytes;
                int is_query = head < model->num_heads;
                const float *norm = is_query ? layer->q_norm : head < rotated ? layer->k_norm : 0;
                baton_load_row(wide, at, dim, job->dtype);
                if (norm) baton_norm_row(wide, wide, norm, dim, model->norm_eps);
                if (layer->has_rope && head < rotated) rotate(wide, batch->cos + angles, batch->sin + angles, model->rotary_half);
                if (is_query) {
                    baton_store_row(at, wide, dim, job->dtype);
                } else {
                    int64_t kv_head = (head - model->num_heads) % num_kv_heads;
                    head_cache cache = head_cache_of(job, sequence, kv_head);
                    char *slot = (char *)row_at(&cache, position) + (head < rotated ? 0 : cache.values_at);
                    baton_store_row(slot, wide, dim, batch->cache_dtype);
                }
            }
        }
}

// qkv: [num_tokens, heads + 2 kv_heads, dim] as projected, overwritten; out: [num_tokens, heads, dim]; both of `dtype`.
void baton_attend(baton_pool *pool, const baton_model *model, const baton_batch *batch, int64_t layer, void *qkv,
                  void *out, int dtype) {
    attention job = {model, batch, layer, qkv, out, dtype, 0};
    baton_run(pool, place_sequences, &job, batch->num_tokens >= 16 ? batch->num_sequences : 1);
    atomic_store(&job.next, 0);
    baton_run(pool, attend_tiles, &job, batch->num_sequences * model->num_kv_heads);
}
