/* rule.py for one CPU core, in one pass over memory: torch's fused AdamW wants fp32 gradients and writes no 16-bit weights, and the passes
   that then go before and after it cost a third of its speed. Compiled where it runs, by native.py; threads are the caller's. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, BFLOAT16_STOCHASTIC };

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* To the nearest, ties to even; a NaN stays one. */
INLINE uint16_t nearest(float x)
{
    uint32_t b = bits_of(x);
    uint32_t up = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
    return x == x ? up : 0x7FC0;
}

INLINE float load(const void *from, int64_t i, int kind)
{
    return kind == FLOAT32 ? ((const float *)from)[i] : float_of((uint32_t)((const uint16_t *)from)[i] << 16);
}

INLINE void store(void *to, int64_t i, float x, int kind, uint32_t noise)
{
    if (kind == FLOAT32) ((float *)to)[i] = x;
    else if (kind == BFLOAT16) ((uint16_t *)to)[i] = nearest(x);
    else ((uint16_t *)to)[i] = (bits_of(x) + noise) >> 16;
}

typedef struct { float scale, shrink, gain1, beta2, gain2, step_size, root, eps; uint32_t start, key; } Rule;

INLINE void step(int64_t n, float *restrict master, const void *restrict grad, int grads, void *restrict first, void *restrict second, int state,
                 void *restrict weight, int weights, Rule r)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float g = load(grad, i, grads) * r.scale, m = load(first, i, state), v = load(second, i, state), p = master[i] * r.shrink;
        m = m + (g - m) * r.gain1;
        v = v * r.beta2 + g * g * r.gain2;
        p = p - r.step_size * (m / (sqrtf(v) / r.root + r.eps));
        uint32_t x = 0;
        if (state == BFLOAT16_STOCHASTIC) {
            x = ((uint32_t)i + r.start) * 0x9E3779B1u + r.key;
            x = (x ^ (x >> 16)) * 0x7FEB352Du;
            x = (x ^ (x >> 15)) * 0x846CA68Bu;
            x = x ^ (x >> 16);
        }
        master[i] = p;
        store(first, i, m, state, x & 0xFFFF);
        store(second, i, v, state, x >> 16);
        store(weight, i, p, weights, 0);
    }
}

void adamw(int64_t n, float *master, const void *grad, int grads, void *first, void *second, int state, void *weight, int weights, const Rule *r)
{
#define STEP(G, S, W) if (grads == G && state == S && weights == W) step(n, master, grad, G, first, second, S, weight, W, *r)
#define STEPS(G, W) STEP(G, FLOAT32, W); STEP(G, BFLOAT16, W); STEP(G, BFLOAT16_STOCHASTIC, W)
    STEPS(FLOAT32, FLOAT32);
    STEPS(FLOAT32, BFLOAT16);
    STEPS(BFLOAT16, BFLOAT16);
}

/* total = part, or total + part. */
INLINE void gather(int64_t n, void *restrict total, int totals, const void *restrict part, int parts, int first)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float x = load(part, i, parts);
        store(total, i, first ? x : load(total, i, totals) + x, totals, 0);
    }
}

void add(int64_t n, void *total, int totals, const void *part, int parts, int first)
{
#define GATHER(T, P) if (totals == T && parts == P) { if (first) gather(n, total, T, part, P, 1); else gather(n, total, T, part, P, 0); }
    GATHER(FLOAT32, FLOAT32)
    GATHER(FLOAT32, BFLOAT16)
    GATHER(BFLOAT16, BFLOAT16)
}

INLINE double squares(int64_t n, const void *x, int kind)
{
    double all = 0;
    for (int64_t start = 0; start < n; start += 4096) { /* short sums in fp32, their sum in double */
        int64_t stop = start + 4096 < n ? start + 4096 : n;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = start; i < stop; i++) {
            float value = load(x, i, kind);
            sum += value * value;
        }
        all += sum;
    }
    return all;
}

double sum_of_squares(int64_t n, const void *x, int kind) { return kind == FLOAT32 ? squares(n, x, FLOAT32) : squares(n, x, BFLOAT16); }
