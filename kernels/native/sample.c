// What the sampler needs of a whole row of logits.
#include "baton.h"
#include "vec.h"

#define BLOCK 128  // as in sampling.py

// weights[i] = 2^((row[i] - best) * scale), and their sums in blocks; each at a fixed place in a fixed order.
void baton_weigh(const float *row, int64_t n, float best, float scale, float *weights, float *sums) {
    for (int64_t first = 0; first < n; first += BLOCK) {
        int64_t end = first + BLOCK < n ? first + BLOCK : n, i = first;
        vf sum = splat(0.0f);
        for (; i + LANES <= end; i += LANES) {
            vf weight = exp2_lanes((load(row + i) - best) * scale);
            store(weights + i, weight);
            sum += weight;
        }
        if (i < end) {
            float rest[LANES];
            for (int lane = 0; lane < LANES; lane++) rest[lane] = i + lane < end ? row[i + lane] : -INFINITY;
            vf weight = exp2_lanes((load(rest) - best) * scale);
            store(rest, weight);
            memcpy(weights + i, rest, (size_t)(end - i) * sizeof *rest);
            sum += weight;
        }
        float parts[LANES];
        store(parts, sum);
        for (int width = LANES / 2; width; width /= 2)
            for (int lane = 0; lane < width; lane++) parts[lane] += parts[lane + width];
        *sums++ = parts[0];
    }
}
