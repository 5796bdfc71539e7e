// Bringing weights into the order of panel.h, and making integers of them on the way.
#include <stdlib.h>

#include "panel.h"

int64_t baton_packed_bytes(const baton_linear *linear) {
    return num_panels(linear) * panel_bytes(linear->num_inputs, linear->format);
}

// One output's part of a block of codes: that of input k lies at place_of(k), `column` included.
static int64_t place_of(int64_t k, int64_t column) { return (k / 2 * PANEL + column) * 2 + k % 2; }

// Where an output lies among one input's PANEL floats.
static int64_t float_place_of(int64_t column, int format) {
    return format == BATON_F32 ? column : column % LANES * 2 + column / LANES;
}

static void place_floats(char *panel, int64_t column, const void *row, int64_t n, int format) {
    int64_t to = float_place_of(column, format);
    if (format == BATON_F32)
        for (int64_t k = 0; k < n; k++) ((uint32_t *)panel)[k * PANEL + to] = ((const uint32_t *)row)[k];
    else
        for (int64_t k = 0; k < n; k++) ((uint16_t *)panel)[k * PANEL + to] = ((const uint16_t *)row)[k];
}

// What one code of an int16 output stands for: as little as the sizes of the code and of any group's sum allow.
static float int16_scale(const float *w, int64_t n) {
    float largest = 0.0f, largest_sum = 0.0f, nan_if_not_finite = 0.0f;
    for (int64_t begin = 0; begin < n; begin += X_GROUP) {
        float sum = 0.0f;
        for (int64_t k = begin; k < n && k < begin + X_GROUP; k++) {
            sum += fabsf(w[k]);
            largest = fmaxf(largest, fabsf(w[k]));
        }
        largest_sum = fmaxf(largest_sum, sum);
        nan_if_not_finite += sum - sum;
    }
    // Rounding a group may add half a code each, and float32 one in 2^17 of the sum.
    return fmaxf(largest / 32767.0f, largest_sum / (MAX_CODE_SUM - X_GROUP)) + nan_if_not_finite;
}

static void quantize_int16(char *panel, int64_t column, const float *w, int64_t n) {
    float scale = int16_scale(w, n), inverse = scale > 1e-34f ? 1.0f / scale : 0.0f;
    ((float *)panel)[column] = scale;
    int16_t *codes = (int16_t *)(panel + head_bytes(BATON_INT16));
    for (int64_t k = 0; k < n; k++) codes[place_of(k, column)] = (int16_t)lrintf(w[k] * inverse);
}

static void quantize_int8(char *block, int64_t column, const float *w) {
    float largest = 0.0f;
    for (int k = 0; k < GROUP; k++) largest = fmaxf(largest, fabsf(w[k]));
    float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    ((float *)block)[column] = scale;
    int8_t *codes = (int8_t *)codes_of(block, BATON_INT8);
    for (int k = 0; k < GROUP; k++) codes[place_of(k, column)] = (int8_t)lrintf(w[k] * inverse);
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
    uint32_t *words = (uint32_t *)codes_of(block, BATON_INT4);
    for (int k = 0; k < GROUP; k++) words[k / 8 * PANEL + column] |= (uint32_t)code[k] << (k % 8 / 2 * 4 + k % 2 * 16);
}

// Puts rows [num_rows, num_inputs] of a weight matrix in as outputs first_row, first_row + 1, ... The weights start as zeros.
// Their format is `dtype`, or integers; int8 and int4 need a multiple of GROUP inputs. Returns 0, or -1 when there is no memory for a row.
int baton_pack(const baton_linear *linear, const void *rows, int64_t num_rows, int64_t first_row, int dtype) {
    int64_t num_inputs = linear->num_inputs;
    int format = linear->format;
    float *w = malloc((size_t)num_inputs * sizeof *w);
    if (!w) return -1;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t place = column_of(linear, first_row + row), column = place % PANEL;
        char *panel = (char *)linear->weights + place / PANEL * panel_bytes(num_inputs, format);
        const char *from = (const char *)rows + row * num_inputs * baton_dtype_bytes(dtype);
        baton_load_row(w, from, num_inputs, dtype);
        switch (format) {
            default: place_floats(panel, column, from, num_inputs, format); break;
            case BATON_INT16: quantize_int16(panel, column, w, num_inputs); break;
            case BATON_INT8:
                for (int64_t k = 0; k < num_inputs; k += GROUP) quantize_int8(panel + input_bytes(k, format), column, w + k);
                break;
            case BATON_INT4:
                for (int64_t k = 0; k < num_inputs; k += GROUP) quantize_int4(panel + input_bytes(k, format), column, w + k);
                break;
        }
    }
    free(w);
    return 0;
}

static float weight_at(const char *panel, int64_t column, int64_t k, int format) {
    float weight;
    const char *block = panel + head_bytes(format) + input_bytes(k, format);  // with groups: the one `k` is in
    const float *scale = (const float *)block + column;
    switch (format) {
        default:
            baton_load_row(&weight, block + float_place_of(column, format) * baton_dtype_bytes(format), 1, format);
            return weight;
        case BATON_INT16:
            return ((const int16_t *)(panel + head_bytes(format)))[place_of(k, column)] * ((const float *)panel)[column];
        case BATON_INT8:
            return ((const int8_t *)codes_of(block, format))[place_of(k % GROUP, column)] * *scale;
        case BATON_INT4: {
            uint32_t word = ((const uint32_t *)codes_of(block, format))[k % GROUP / 8 * PANEL + column];
            return (float)(word >> (k % 8 / 2 * 4 + k % 2 * 16) & 15) * *scale + scale[PANEL];
        }
    }
}

// One row of the weight matrix in float32: an embedding looked up in the head.
void baton_unpack_row(const baton_linear *linear, int64_t row, float *to) {
    int64_t place = column_of(linear, row);
    const char *panel = (const char *)linear->weights + place / PANEL * panel_bytes(linear->num_inputs, linear->format);
    for (int64_t k = 0; k < linear->num_inputs; k++) to[k] = weight_at(panel, place % PANEL, k, linear->format);
}
