// What Python sees of the library, and what its files see of each other. `library.py` mirrors the structs.
#pragma once

#include <stdatomic.h>
#include <stdint.h>

enum baton_dtype { BATON_F32 = 0, BATON_BF16 = 1, BATON_F16 = 2 };
enum baton_format { BATON_INT8 = 3, BATON_INT4 = 4, BATON_INT16 = 5 };  // of weights, beside the dtypes; see panel.h

// Workers and their scratch memory; see pool.c.
typedef struct baton_pool baton_pool;
// Called in several threads at once; they share the work by taking from a counter in the job.
typedef void (*baton_task)(void *job, void *scratch);

#define BATON_SCRATCH_BYTES (1 << 20)  // of each worker

// y = x * W^T + bias; gated: y = silu(first half of that) * second half. See panel.h for the order of `weights`.
typedef struct {
    int64_t num_outputs;  // rows of W
    int64_t num_inputs;
    void *weights;
    const float *bias;  // [num_outputs], or null
    int32_t format;
    int32_t is_gated;
} baton_linear;

typedef struct {
    const float *input_norm;  // [hidden]
    const float *q_norm;      // [head_dim], or null
    const float *k_norm;      // [head_dim], or null
    const float *post_norm;   // [hidden]
    baton_linear qkv, o, gate_up, down;
    int32_t has_rope;
    int32_t window;  // a token sees at most this many tokens, itself included; 0: all
} baton_layer;

typedef struct {
    int64_t hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, rotary_half;
    float norm_eps;
    const baton_layer *layers;
    baton_linear embedding;  // packed as the head is: token t is output t
    baton_linear head;
    const float *final_norm;  // [hidden]
} baton_model;

// One step's tokens, sequence after sequence.
typedef struct {
    int64_t num_tokens, num_sequences;
    const int32_t *token_ids;  // [num_tokens]
    const float *cos, *sin;    // [positions or tokens, rotary_half]
    const int32_t *first_row;  // [num_sequences + 1] into the tokens
    const int32_t *start;      // [num_sequences] tokens of the sequence before these
    const int32_t *tables;     // block numbers of all sequences, one after the other
    const int32_t *first_block;  // [num_sequences] into `tables`
    void *cache;  // [blocks, layers, 2, kv_heads, block_tokens, head_dim]
    int64_t block_tokens;
    int32_t cache_dtype;
    int32_t has_token_angles;  // cos and sin are by token; otherwise by position
    int64_t num_outputs;
    const int32_t *outputs;  // [num_outputs] tokens whose hidden rows are wanted, ascending; of the others only the KV is
} baton_batch;

// What a pool's memory is kept for, from step to step: to map and clear new memory takes longer than much of the work in it.
typedef enum { BATON_ACTIVATIONS, BATON_OPERAND, BATON_HIGHEST, BATON_NUM_USES } baton_use;

// pool.c
baton_pool *baton_pool_create(int num_workers);
void baton_pool_destroy(baton_pool *pool);
int baton_pool_size(const baton_pool *pool);
void *baton_pool_memory(baton_pool *pool, baton_use use, int64_t bytes);
void baton_run(baton_pool *pool, baton_task task, void *job, int64_t num_pieces);

// Takes the next `count` of a task's `n` pieces, as [begin, end); false: none is left.
static inline int baton_take(atomic_long *next, int64_t n, int64_t count, int64_t *begin, int64_t *end) {
    *begin = atomic_fetch_add_explicit(next, count, memory_order_relaxed);
    *end = *begin + count < n ? *begin + count : n;
    return *begin < n;
}

// rows.c
int64_t baton_dtype_bytes(int dtype);
void baton_load_row(float *to, const void *from, int64_t n, int dtype);
void baton_store_row(void *to, const float *from, int64_t n, int dtype);
void baton_norm_row(float *to, const float *x, const float *weight, int64_t n, float eps);
void baton_rms_norm(baton_pool *pool, float *x, const void *delta, const float *weight, float eps, void *out,
                    int64_t num_rows, int64_t dim, int dtype);
void baton_silu_mul(baton_pool *pool, const void *gate_up, void *out, int64_t num_rows, int64_t dim, int dtype);

// pack.c
int64_t baton_packed_bytes(const baton_linear *linear);
int baton_pack(const baton_linear *linear, const void *rows, int64_t num_rows, int64_t first_row, int dtype);
void baton_unpack_row(const baton_linear *linear, int64_t row, float *to);

// linear.c
int baton_multiply(baton_pool *pool, const baton_linear *linear, const float *x, float *y, int64_t num_rows, int32_t *best);

// attention.c
int baton_can_attend(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim);
void baton_attend(baton_pool *pool, const baton_model *model, const baton_batch *batch, int64_t layer, void *qkv,
                  void *out, int dtype);

// sample.c
void baton_weigh(const float *row, int64_t n, float best, float scale, float *weights, float *sums);

// step.c
int baton_forward(baton_pool *pool, const baton_model *model, const baton_batch *batch, float *outputs);
int baton_logits(baton_pool *pool, const baton_model *model, const float *hidden, int64_t num_rows, float *logits, int32_t *best);
