// How weights lie in memory: in panels of PANEL outputs, inside a panel input after input, so that a product reads memory
// once, in order. A gated product's panels have LANES outputs of its first half, then the same ones of the second.
//
// Floats lie there as they are; a word of 16-bit ones holds two outputs LANES apart, which one shift and one mask widen.
// Integers stand for themselves times a scale, and are multiplied as integers:
//   int16: what 16-bit floats become. A panel begins with a scale for each output, the same for all inputs: a code is about
//          1/8,000 of the output's largest weight, 1/2,046 at most. The codes of inputs 2i and 2i + 1 of an output share a word.
//   int8:  blocks of GROUP inputs: for each output a float32 scale, then the codes, in pairs as those of int16.
//   int4:  blocks of GROUP inputs: for each output a float32 scale and a minimum, then the codes; those of 8 inputs share a
//          word, inputs 2i and 2i + 1 of them as nibbles i and i + 4.
#pragma once

#include "baton.h"
#include "vec.h"

enum {
    PANEL = 2 * LANES,
    GROUP = 32,        // inputs of an int8 or int4 block
    X_GROUP = 64,      // elements of x that share a scale; whole groups of weights
    MAX_X_CODE = 16383,
    // Any X_GROUP codes of an int16 output add up to at most this, so that a group's product fits 32 bits whatever x is.
    MAX_CODE_SUM = 0x7fffffff / MAX_X_CODE,
};

INLINE int is_float(int format) { return format == BATON_F32 || format == BATON_BF16 || format == BATON_F16; }

// The least number of whole groups of x, in inputs.
INLINE int64_t padded_inputs(int64_t n) { return (n + X_GROUP - 1) / X_GROUP * X_GROUP; }

// The number of inputs a panel has weights for; those too many are 0.
INLINE int64_t stored_inputs(int64_t n, int format) { return format == BATON_INT16 ? padded_inputs(n) : n; }

// Bytes in front of a panel's first input.
INLINE int64_t head_bytes(int format) { return format == BATON_INT16 ? PANEL * 4 : 0; }

// Bytes of `inputs` inputs of one panel; of whole groups, where there are groups.
INLINE int64_t input_bytes(int64_t inputs, int format) {
    switch (format) {
        case BATON_F32: return inputs * PANEL * 4;
        case BATON_INT8: return inputs / GROUP * (PANEL * 4 + GROUP * PANEL);
        case BATON_INT4: return inputs / GROUP * (PANEL * 8 + GROUP * PANEL / 2);
        default: return inputs * PANEL * 2;
    }
}

INLINE int64_t panel_bytes(int64_t num_inputs, int format) {
    return head_bytes(format) + input_bytes(stored_inputs(num_inputs, format), format);
}

// How many values a product gives for each row, and how many of them one panel.
INLINE int64_t num_columns(const baton_linear *linear) { return linear->is_gated ? linear->num_outputs / 2 : linear->num_outputs; }
INLINE int64_t panel_columns(const baton_linear *linear) { return linear->is_gated ? LANES : PANEL; }
INLINE int64_t num_panels(const baton_linear *linear) {
    return (num_columns(linear) + panel_columns(linear) - 1) / panel_columns(linear);
}

// Which of all the panels' columns an output has.
INLINE int64_t column_of(const baton_linear *linear, int64_t output) {
    if (!linear->is_gated) return output;
    int64_t half = linear->num_outputs / 2, is_second = output >= half, at = output - is_second * half;
    return at / LANES * PANEL + is_second * LANES + at % LANES;
}

// The weights of one input, where they are floats.
INLINE void load_column(const char *weights, vf column[2], const int format) {
    vu words = load_words(weights);
    switch (format) {
        case BATON_F32:
            column[0] = (vf)words;
            column[1] = load((const float *)weights + LANES);
            break;
        case BATON_BF16:
            column[0] = low_bf16(words);
            column[1] = high_bf16(words);
            break;
        default:
            column[0] = low_f16(words);
            column[1] = high_f16(words);
    }
}

// The codes of a block, behind its scales.
INLINE const char *codes_of(const char *block, int format) {
    return block + (format == BATON_INT4 ? PANEL * 8 : format == BATON_INT8 ? PANEL * 4 : 0);
}

// Bytes of one input's codes in a panel.
INLINE int code_bytes(int format) { return format == BATON_INT16 ? PANEL * 2 : format == BATON_INT8 ? PANEL : PANEL / 2; }

// The codes of inputs 2 * pair and the next for one vector of outputs, two in each word; `pair` is a constant below 4.
INLINE vi load_codes(const char *codes, const int pair, const int vector, const int format) {
    if (format == BATON_INT16) return (vi)load_words(codes + (pair * 2 + vector) * LANES * 4);
    if (format == BATON_INT8) return load_bytes(codes + (pair * 2 + vector) * LANES * 2);
    return (vi)(load_words(codes + vector * LANES * 4) >> (unsigned)(pair * 4) & 0x000f000fu);
}
