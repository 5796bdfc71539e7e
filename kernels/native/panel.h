// How weights lie in memory: in panels of PANEL outputs, inside a panel input after input, so that a product reads memory
// once, in order. 16-bit weights lie in pairs: a word holds two outputs LANES apart, which one shift and one mask widen.
//
// int8 and int4 come in blocks of GROUP inputs: for each output a float32 scale (int4: and a minimum), then the codes. A
// word holds the codes of 4 outputs LANES apart: those of one input in int8, of two in int4.
#pragma once

#include "baton.h"
#include "vec.h"

enum { PANEL = 4 * LANES, GROUP = 32 };

INLINE int is_quantized(int format) { return format == BATON_INT8 || format == BATON_INT4; }

// Bytes of `inputs` inputs of one panel; of whole groups, where there are groups.
INLINE int64_t panel_bytes(int64_t inputs, int format) {
    switch (format) {
        case BATON_F32: return inputs * PANEL * 4;
        case BATON_INT8: return inputs / GROUP * (PANEL * 4 + GROUP * PANEL);
        case BATON_INT4: return inputs / GROUP * (PANEL * 8 + GROUP * PANEL / 2);
        default: return inputs * PANEL * 2;
    }
}

// The weights of one input for `width` vectors of outputs, from vector `first` of the panel on (0 or 2).
INLINE void load_columns(const char *weights, vf column[4], const int first, const int width, const int format) {
    UNROLL for (int j = 0; j < width; j += 2) {
        if (format == BATON_F32) {
            column[j] = load((const float *)weights + (first + j) * LANES);
            column[j + 1] = load((const float *)weights + (first + j + 1) * LANES);
        } else {
            vu words = load_words((const uint32_t *)weights + (first + j) / 2 * LANES);
            column[j] = format == BATON_BF16 ? low_bf16(words) : low_f16(words);
            column[j + 1] = format == BATON_BF16 ? high_bf16(words) : high_f16(words);
        }
    }
}

// What turns the codes of a block into weights: code * scale + least.
typedef struct {
    vf scale[4], least[4];
} decoder;

INLINE decoder load_decoder(const char *block, const int first, const int width, const int format) {
    decoder with;
    UNROLL for (int j = 0; j < width; j++) {
        with.scale[j] = load((const float *)block + (first + j) * LANES);
        if (format == BATON_INT4) with.least[j] = load((const float *)block + PANEL + (first + j) * LANES);
    }
    return with;
}

// `load_columns` for input `even + odd` of a block.
INLINE void decode_columns(const char *block, int even, const int odd, const decoder *with, vf column[4], const int first, const int width,
                           const int format) {
    const uint32_t *codes = (const uint32_t *)((const float *)block + (format == BATON_INT8 ? PANEL : 2 * PANEL));
    vu words = load_words(codes + (format == BATON_INT8 ? even + odd : even / 2) * LANES);
    UNROLL for (int j = 0; j < width; j++) {
        if (format == BATON_INT8) {
            vi code = (vi)(words << (24 - 8 * (first + j))) >> 24;
            column[j] = __builtin_convertvector(code, vf) * with->scale[j];
        } else {
            vi code = (vi)(words >> (4 * (first + j) + odd * 16) & 15u);
            column[j] = __builtin_convertvector(code, vf) * with->scale[j] + with->least[j];
        }
    }
}
