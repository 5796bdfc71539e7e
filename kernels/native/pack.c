// Bringing weights into the order of panel.h, and quantising them on the way.
#include "panel.h"

int64_t baton_packed_bytes(int64_t num_outputs, int64_t num_inputs, int format) {
    return (num_outputs + PANEL - 1) / PANEL * panel_bytes(num_inputs, format);
}

// Where output `column` of a panel lies in one input's PANEL elements of a float format.
static int64_t place_of(int64_t column, int format) {
    if (format == BATON_F32) return column;
    int64_t half = column / (2 * LANES), inside = column % (2 * LANES);
    return half * 2 * LANES + inside % LANES * 2 + inside / LANES;
}

// Inputs [begin, end) of one output.
static void place(char *panel, int64_t column, const void *row, int64_t begin, int64_t end, int format) {
    int64_t to = place_of(column, format);
    if (format == BATON_F32)
        for (int64_t k = begin; k < end; k++) ((uint32_t *)panel)[k * PANEL + to] = ((const uint32_t *)row)[k];
    else
        for (int64_t k = begin; k < end; k++) ((uint16_t *)panel)[k * PANEL + to] = ((const uint16_t *)row)[k];
}

static void quantize_int8(char *block, int64_t column, const float *w) {
    float largest = 0.0f;
    for (int k = 0; k < GROUP; k++) largest = fmaxf(largest, fabsf(w[k]));
    float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    ((float *)block)[column] = scale;
    int8_t *codes = (int8_t *)((float *)block + PANEL) + column % LANES * 4 + column / LANES;
    for (int k = 0; k < GROUP; k++) codes[k * PANEL] = (int8_t)lrintf(w[k] * inverse);
}

// Codes between the group's least and largest weight; then the line through them that fits the weights best, which
// recovers what the weights were rounded from if they have been of this form before (GGUF's Q4_1).
static void quantize_int4(char *block, int64_t column, const float *w) {
    float least = w[0], largest = w[0];
    for (int k = 1; k < GROUP; k++) {
        least = fminf(least, w[k]);
        largest = fmaxf(largest, w[k]);
    }
    float scale = (largest - least) / 15.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int code[GROUP];
    double sum_q = 0, sum_w = 0, sum_qq = 0, sum_qw = 0;
    for (int k = 0; k < GROUP; k++) {
        long q = lrintf((w[k] - least) * inverse);
        code[k] = q > 15 ? 15 : (int)q;
        sum_q += code[k];
        sum_w += w[k];
        sum_qq += code[k] * code[k];
        sum_qw += code[k] * (double)w[k];
    }
    double spread = GROUP * sum_qq - sum_q * sum_q;
    if (spread > 0) {
        double slope = (GROUP * sum_qw - sum_q * sum_w) / spread;
        scale = (float)slope;
        least = (float)((sum_w - slope * sum_q) / GROUP);
    }
    ((float *)block)[column] = scale;
    ((float *)block)[PANEL + column] = least;
    uint8_t *codes = (uint8_t *)((float *)block + 2 * PANEL) + column % LANES * 4;
    for (int k = 0; k < GROUP; k++) {
        int nibble = (int)(column / LANES) + k % 2 * 4;
        codes[k / 2 * LANES * 4 + nibble / 2] |= (uint8_t)(code[k] << (nibble % 2 * 4));
    }
}

static void quantize(char *panel, int64_t column, const void *row, int64_t begin, int64_t end, int dtype, int format) {
    for (int64_t k = begin; k < end; k += GROUP) {
        float w[GROUP];
        baton_load_row(w, (const char *)row + k * baton_dtype_bytes(dtype), GROUP, dtype);
        char *block = panel + panel_bytes(k, format);
        if (format == BATON_INT8) quantize_int8(block, column, w);
        else quantize_int4(block, column, w);
    }
}

// Puts rows [num_rows, num_inputs] of a weight matrix in as outputs first_row, first_row + 1, ... `packed` starts as zeros.
// `format` is `dtype`, or quantised; then num_inputs is a multiple of GROUP.
void baton_pack(void *packed, const void *rows, int64_t num_rows, int64_t first_row, int64_t num_inputs, int dtype, int format) {
    enum { INPUTS_AT_ONCE = 64 };  // so that the rows of a panel meet in the cache
    for (int64_t row = 0; row < num_rows;) {
        int64_t column = (first_row + row) % PANEL;
        int64_t n = PANEL - column < num_rows - row ? PANEL - column : num_rows - row;
        char *panel = (char *)packed + (first_row + row) / PANEL * panel_bytes(num_inputs, format);
        for (int64_t begin = 0; begin < num_inputs; begin += INPUTS_AT_ONCE) {
            int64_t end = begin + INPUTS_AT_ONCE < num_inputs ? begin + INPUTS_AT_ONCE : num_inputs;
            for (int64_t i = 0; i < n; i++) {
                const char *from = (const char *)rows + (row + i) * num_inputs * baton_dtype_bytes(dtype);
                if (is_quantized(format)) quantize(panel, column + i, from, begin, end, dtype, format);
                else place(panel, column + i, from, begin, end, format);
            }
        }
        row += n;
    }
}

// One row of the weight matrix in float32: an embedding looked up in the head.
void baton_unpack_row(const baton_linear *linear, int64_t row, float *to) {
    int format = linear->format;
    int64_t column = row % PANEL;
    const char *panel = (const char *)linear->weights + row / PANEL * panel_bytes(linear->num_inputs, format);
    for (int64_t k = 0; k < linear->num_inputs; k++) {
        const char *block = panel + panel_bytes(k, format);  // with groups: the one `k` is in
        if (!is_quantized(format)) {
            baton_load_row(to + k, block + place_of(column, format) * baton_dtype_bytes(format), 1, format);
            continue;
        }
        int first = (int)(column / LANES) & 2, lane = (int)(column % LANES);
        decoder with = load_decoder(block, first, 2, format);
        vf columns[4];
        decode_columns(block, (int)(k % GROUP) & ~1, k & 1, &with, columns, first, 2, format);
        to[k] = columns[column / LANES % 2][lane];
    }
}
