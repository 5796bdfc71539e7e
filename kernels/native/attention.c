// Attention over the paged cache, in place: no block is gathered.
//
// Keys and values are read in spans of SPAN positions counted from position 0, widened once for all queries that look
// at the span, and folded into a running softmax (FlashAttention-2, Dao, 2023). A query's additions happen in the
// order of positions, in spans that do not depend on who else is computed: a token gives the same bits alone, in a
// chunk of any length, and in any batch. A key outside a query's range is never multiplied, so what unused slots
// hold (NaN included) cannot reach a result.
#include <stdatomic.h>

#include "baton.h"
#include "vec.h"

enum {
    SPAN = 32,           // positions; a multiple of 2 * LANES
    MAX_TILE_ROWS = 96,  // (query, head) pairs that share one pass over the keys
    MAX_HEAD_DIM = 512,
};

// The scratch of one worker. Head dimensions are padded to whole vectors.
typedef struct {
    float keys[MAX_HEAD_DIM * SPAN];  // [dim][SPAN]
    float values[SPAN * MAX_HEAD_DIM];  // [SPAN][padded dim]
    float queries[MAX_TILE_ROWS * MAX_HEAD_DIM];  // [row][dim], scaled
    float sums[MAX_TILE_ROWS * MAX_HEAD_DIM];  // [row][padded dim]
    float weights[6 * SPAN];
    float max[MAX_TILE_ROWS], total[MAX_TILE_ROWS];
} tile_memory;

_Static_assert(sizeof(tile_memory) <= BATON_SCRATCH_BYTES, "a tile fits a worker's scratch");

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

// One layer's keys or values of one head in one sequence.
typedef struct {
    const char *base;
    const int32_t *table;
    int64_t block_bytes;  // between blocks of the cache
    int64_t block_tokens;
    int64_t row_bytes;
} head_cache;

static const char *row_at(const head_cache *cache, int64_t position) {
    return cache->base + cache->table[position / cache->block_tokens] * cache->block_bytes +
           position % cache->block_tokens * cache->row_bytes;
}

// kv: 0 for keys, 1 for values.
static head_cache head_cache_of(const attention *job, int64_t sequence, int kv, int64_t kv_head) {
    const baton_model *model = job->model;
    const baton_batch *batch = job->batch;
    int64_t row_bytes = model->head_dim * baton_dtype_bytes(batch->cache_dtype);
    int64_t head_bytes = batch->block_tokens * row_bytes, layer_bytes = 2 * model->num_kv_heads * head_bytes;
    return (head_cache){
        .base = (const char *)batch->cache + job->layer * layer_bytes + (kv * model->num_kv_heads + kv_head) * head_bytes,
        .table = batch->tables + batch->first_block[sequence],
        .block_bytes = model->num_layers * layer_bytes,
        .block_tokens = batch->block_tokens,
        .row_bytes = row_bytes,
    };
}

// Keys of positions [begin, begin + count) as to[dim][SPAN], in float32; what lies beyond `count` means nothing.
INLINE void transpose_keys(const head_cache *cache, int64_t begin, int64_t count, int64_t dim, float *to, const int dtype) {
    const int per_word = dtype == BATON_F32 ? 1 : 2;
    for (int64_t first = 0; first < count; first += LANES) {
        const char *rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = row_at(cache, begin + (first + i < count ? first + i : count - 1));
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

static void load_keys(const head_cache *cache, int64_t begin, int64_t count, int64_t dim, float *to, int dtype) {
    switch (dtype) {
        case BATON_F32: transpose_keys(cache, begin, count, dim, to, BATON_F32); break;
        case BATON_BF16: transpose_keys(cache, begin, count, dim, to, BATON_BF16); break;
        case BATON_F16: transpose_keys(cache, begin, count, dim, to, BATON_F16); break;
    }
}

static void load_values(const head_cache *cache, int64_t begin, int64_t count, int64_t dim, int64_t padded, float *to,
                        int dtype) {
    for (int64_t i = 0; i < count; i++) baton_load_row(to + i * padded, row_at(cache, begin + i), dim, dtype);
}

// Scores of `rows` queries against the span, in base 2.
INLINE void score_tile(const float *queries, int64_t dim, const float *keys, float *scores, const int rows, const int width) {
    for (int at = 0; at < SPAN; at += width * LANES) {
        vf sums[6][4];
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < width; j++) sums[r][j] = (vf){0};
        multiply_tile(queries, dim, keys + at, SPAN, dim, sums, rows, width);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < width; j++) store(scores + r * SPAN + at + j * LANES, sums[r][j]);
    }
}

INLINE void value_tile(const float *weights, const float *values, int64_t padded, int64_t low, int64_t high, float *sums_at,
                       const float *decay, const int rows, const int width) {
    for (int64_t d = 0; d < padded; d += width * LANES) {
        vf sums[6][4];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < width; j++) sums[r][j] = load(sums_at + r * padded + d + j * LANES) * decay[r];
        multiply_tile(weights + low, SPAN, values + low * padded + d, padded, high - low, sums, rows, width);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int j = 0; j < width; j++) store(sums_at + r * padded + d + j * LANES, sums[r][j]);
    }
}

// Scores become weights relative to the new maximum; returns by how much everything before shrinks.
INLINE float soften(float *scores, int64_t low, int64_t high, float *max, float *total) {
    if (low > 0 || high < SPAN)
        for (int64_t i = 0; i < SPAN; i++)
            if (i < low || i >= high) scores[i] = -INFINITY;
    vf largest = load(scores);
    for (int i = LANES; i < SPAN; i += LANES) largest = larger(largest, load(scores + i));
    float before = *max, now = max_lanes(largest);
    if (!(now > before)) now = before;
    vf sum = {0};
    for (int i = 0; i < SPAN; i += LANES) {
        vf weight = exp2_lanes(load(scores + i) - now);
        store(scores + i, weight);
        sum += weight;
    }
    float decay[LANES];
    store(decay, exp2_lanes(splat(before - now)));
    *max = now;
    *total = *total * decay[0] + sum_lanes(sum);
    return decay[0];
}

// Folds positions [low, high) of the loaded span into rows [first, first + rows) of the tile.
INLINE void fold_tile(tile_memory *memory, int64_t dim, int64_t padded, int64_t first, int64_t low, int64_t high,
                      const int rows) {
    float decay[6];
    const int score_width = rows <= 3 && SPAN % (4 * LANES) == 0 ? 4 : 2;
    score_tile(memory->queries + first * dim, dim, memory->keys, memory->weights, rows, score_width);
    for (int r = 0; r < rows; r++)
        decay[r] = soften(memory->weights + r * SPAN, low, high, &memory->max[first + r], &memory->total[first + r]);
    value_tile(memory->weights, memory->values, padded, low, high, memory->sums + first * padded, decay, rows, 2);
}

static void fold(tile_memory *memory, int64_t dim, int64_t padded, int64_t begin, int64_t end, int64_t low, int64_t high) {
    for (int64_t row = begin; row < end; row += 6) {
#define ROWS(n) case n: fold_tile(memory, dim, padded, row, low, high, n); break;
        switch (end - row) {
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5)
            default: fold_tile(memory, dim, padded, row, low, high, 6);
        }
#undef ROWS
    }
}

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// All heads that share `kv_head`, for the queries at positions [begin, end) of a sequence.
static void attend_tile(const attention *job, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end,
                        tile_memory *memory) {
    const baton_model *model = job->model;
    const baton_batch *batch = job->batch;
    int64_t dim = model->head_dim, padded = (dim + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    int64_t group = model->num_heads / model->num_kv_heads, num_rows = (end - begin) * group;
    int64_t window = model->layers[job->layer].window, bytes = baton_dtype_bytes(job->dtype);
    int64_t qkv_bytes = (model->num_heads + 2 * model->num_kv_heads) * dim * bytes;
    int64_t first_token = batch->first_row[sequence] + begin - batch->start[sequence];
    float scale = 1.44269504f / sqrtf((float)dim);  // exp(x) = 2^(x * log2(e))

    for (int64_t row = 0; row < num_rows; row++) {
        float *query = memory->queries + row * dim;
        int64_t head = kv_head * group + row % group;
        baton_load_row(query, job->qkv + (first_token + row / group) * qkv_bytes + head * dim * bytes, dim, job->dtype);
        for (int64_t d = 0; d < dim; d++) query[d] *= scale;
        memory->max[row] = -INFINITY;
        memory->total[row] = 0.0f;
    }
    memset(memory->sums, 0, (size_t)(num_rows * padded) * sizeof(float));
    if (padded > dim) memset(memory->values, 0, (size_t)(SPAN * padded) * sizeof(float));

    head_cache keys = head_cache_of(job, sequence, 0, kv_head), values = head_cache_of(job, sequence, 1, kv_head);
    int64_t oldest = window ? max64(0, begin + 1 - window) : 0;  // that the first query sees
    for (int64_t span = oldest / SPAN * SPAN; span < end; span += SPAN) {
        // Slots before `oldest` may belong to nobody any more, those from `end` on are not written yet.
        int64_t low = max64(span, oldest), count = min64(span + SPAN, end) - low;
        load_keys(&keys, low, count, dim, memory->keys + (low - span), batch->cache_dtype);
        load_values(&values, low, count, dim, padded, memory->values + (low - span) * padded, batch->cache_dtype);
        if (span + SPAN <= begin + 1 && (!window || span > end - 1 - window)) {
            fold(memory, dim, padded, 0, num_rows, 0, SPAN);
            continue;
        }
        for (int64_t position = begin; position < end; position++) {
            int64_t from = window ? max64(span, position + 1 - window) : span, to = min64(span + SPAN, position + 1);
            if (from >= to) continue;
            fold(memory, dim, padded, (position - begin) * group, (position - begin + 1) * group, from - span, to - span);
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
        float *sums = memory->sums + row * padded, scale_back = 1.0f / memory->total[row];
        int64_t token = first_token + row / group, head = kv_head * group + row % group;
        for (int64_t d = 0; d < dim; d++) sums[d] *= scale_back;
        baton_store_row(job->out + (token * model->num_heads + head) * dim * bytes, sums, dim, job->dtype);
    }
}

// Queries in one tile: whole spans where they fit, so that only the last span of a tile is masked.
static int64_t tile_queries(const baton_model *model) {
    return max64(1, min64(SPAN, MAX_TILE_ROWS / (model->num_heads / model->num_kv_heads)));
}

static void attend_tiles(void *arg, int worker, int num_workers, void *scratch) {
    (void)worker;
    attention *job = arg;
    const baton_batch *batch = job->batch;
    int64_t num_kv_heads = job->model->num_kv_heads, step = tile_queries(job->model);
    int64_t tile = 0, mine = num_workers > 1 ? atomic_fetch_add(&job->next, 1) : 0;
    for (int64_t sequence = 0; sequence < batch->num_sequences; sequence++) {
        int64_t start = batch->start[sequence];
        int64_t stop = start + batch->first_row[sequence + 1] - batch->first_row[sequence];
        for (int64_t begin = start; begin < stop; begin = min64(stop, (begin / step + 1) * step))
            for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++, tile++) {
                if (tile != mine) continue;
                attend_tile(job, sequence, kv_head, begin, min64(stop, (begin / step + 1) * step), scratch);
                mine = num_workers > 1 ? atomic_fetch_add(&job->next, 1) : mine + 1;
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
static void place_rows(void *arg, int worker, int num_workers, void *scratch) {
    const attention *job = arg;
    const baton_model *model = job->model;
    const baton_batch *batch = job->batch;
    const baton_layer *layer = &model->layers[job->layer];
    int64_t dim = model->head_dim, bytes = baton_dtype_bytes(job->dtype);
    int64_t num_kv_heads = model->num_kv_heads, rotated = model->num_heads + num_kv_heads;
    float *wide = scratch;
    for (int64_t sequence = 0; sequence < batch->num_sequences; sequence++)
        for (int64_t token = batch->first_row[sequence]; token < batch->first_row[sequence + 1]; token++) {
            if (token % num_workers != worker) continue;
            int64_t position = batch->start[sequence] + token - batch->first_row[sequence];
            for (int64_t head = 0; head < rotated + num_kv_heads; head++) {
                char *at = job->qkv + (token * (rotated + num_kv_heads) + head) * dim * bytes;
                int is_query = head < model->num_heads;
                const float *norm = is_query ? layer->q_norm : head < rotated ? layer->k_norm : 0;
                baton_load_row(wide, at, dim, job->dtype);
                if (norm) baton_norm_row(wide, wide, norm, dim, model->norm_eps);
                if (layer->has_rope && head < rotated)
                    rotate(wide, batch->cos + token * model->rotary_half, batch->sin + token * model->rotary_half,
                           model->rotary_half);
                if (is_query) {
                    baton_store_row(at, wide, dim, job->dtype);
                } else {
                    int64_t kv_head = (head - model->num_heads) % num_kv_heads;
                    head_cache cache = head_cache_of(job, sequence, head >= rotated, kv_head);
                    baton_store_row((char *)row_at(&cache, position), wide, dim, batch->cache_dtype);
                }
            }
        }
}

// qkv: [num_tokens, heads + 2 kv_heads, dim] as projected, overwritten; out: [num_tokens, heads, dim]; both of `dtype`.
void baton_attend(baton_pool *pool, const baton_model *model, const baton_batch *batch, int64_t layer, void *qkv,
                  void *out, int dtype) {
    attention job = {model, batch, layer, qkv, out, dtype, 0};
    baton_run(pool, place_rows, &job);
    baton_run(pool, attend_tiles, &job);
}
