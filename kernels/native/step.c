// One step of the whole model in one call.
#include "baton.h"
#include "vec.h"

// Rows that go through a layer's products together, so that what one leaves the next finds in the cache.
enum { BLOCK_ROWS = 192 };

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
    const baton_model *model;
    const baton_batch *batch;
    float *hidden;
    atomic_long next;
} embedding_job;

static void embed_rows(void *arg, void *scratch) {
    (void)scratch;
    embedding_job *job = arg;
    for (int64_t token, end; baton_take(&job->next, job->batch->num_tokens, 1, &token, &end);)
        baton_unpack_row(&job->model->embedding, job->batch->token_ids[token],
                         job->hidden + token * job->model->hidden_size);
}

// Moves those rows, in ascending order, to the front.
static void keep_rows(float *rows, int64_t size, const int32_t *kept, int64_t num_kept) {
    for (int64_t i = 0; i < num_kept; i++) memmove(rows + i * size, rows + kept[i] * size, (size_t)size * sizeof *rows);
}

// Leaves the hidden rows of the batch's outputs in `outputs`. Returns 0, or not when there is no memory for the activations.
int baton_forward(baton_pool *pool, const baton_model *model, const baton_batch *batch, float *outputs) {
    int64_t n = batch->num_tokens, size = model->hidden_size, inter = model->intermediate_size;
    int64_t block = min64(n, BLOCK_ROWS), q_size = model->num_heads * model->head_dim;
    int64_t qkv_size = q_size + 2 * model->num_kv_heads * model->head_dim;
    int64_t floats = n * (size + qkv_size + q_size) + block * (2 * size + inter);
    float *hidden = baton_pool_memory(pool, BATON_ACTIVATIONS, floats * (int64_t)sizeof *hidden);
    if (!hidden) return -1;
    float *qkv = hidden + n * size, *attended = qkv + n * qkv_size, *normed = attended + n * q_size;
    float *delta = normed + block * size, *gated = delta + block * size;

    embedding_job embedding = {model, batch, hidden, 0};
    baton_run(pool, embed_rows, &embedding, n >= 16 ? n : 1);
    int failed = 0;
    for (int64_t number = 0; number < model->num_layers; number++) {
        const baton_layer *layer = &model->layers[number];
        for (int64_t row = 0; row < n; row += block) {
            int64_t rows = min64(block, n - row);
            baton_rms_norm(pool, hidden + row * size, NULL, layer->input_norm, model->norm_eps, normed, rows, size, BATON_F32);
            failed |= baton_multiply(pool, &layer->qkv, normed, qkv + row * qkv_size, rows, NULL);
        }
        baton_attend(pool, model, batch, number, qkv, attended, BATON_F32);
        if (number == model->num_layers - 1) {
            // From here on nobody needs the others.
            n = batch->num_outputs;
            keep_rows(hidden, size, batch->outputs, n);
            keep_rows(attended, q_size, batch->outputs, n);
        }
        for (int64_t row = 0; row < n; row += block) {
            int64_t rows = min64(block, n - row);
            float *x = hidden + row * size;
            failed |= baton_multiply(pool, &layer->o, attended + row * q_size, delta, rows, NULL);
            baton_rms_norm(pool, x, delta, layer->post_norm, model->norm_eps, normed, rows, size, BATON_F32);
            failed |= baton_multiply(pool, &layer->gate_up, normed, gated, rows, NULL);
            failed |= baton_multiply(pool, &layer->down, gated, delta, rows, NULL);
            baton_rms_norm(pool, x, delta, NULL, model->norm_eps, NULL, rows, size, BATON_F32);
        }
    }
    memcpy(outputs, hidden, (size_t)(n * size) * sizeof *outputs);
    return failed;
}

// logits[num_rows, num_outputs of the head] of rows of what `baton_forward` gave, and the best token of each. Returns as that does.
int baton_logits(baton_pool *pool, const baton_model *model, const float *hidden, int64_t num_rows, float *logits, int32_t *best) {
    int64_t bytes = num_rows * model->hidden_size * (int64_t)sizeof(float);
    float *normed = baton_pool_memory(pool, BATON_ACTIVATIONS, bytes);
    if (!normed) return -1;
    memcpy(normed, hidden, (size_t)bytes);
    baton_rms_norm(pool, normed, NULL, model->final_norm, model->norm_eps, normed, num_rows, model->hidden_size, BATON_F32);
    return baton_multiply(pool, &model->head, normed, logits, num_rows, best);
}
