/* The AdamW step of rule.py for many CPU cores, in one pass over memory: torch's fused AdamW wants fp32 gradients and
   writes no 16-bit weights, and the extra passes before and after it cost a third of its speed. cpu_kernels.py compiles
   this file where it runs. The threads are its own: Python tasks for every piece would contend for the GIL with the
   thread that launches the device's kernels. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A team of threads works with the calling thread: each takes the next piece of a job until none is left. */

#define PIECE 65536 /* elements */

typedef void Work(const void *job, int64_t piece);

typedef struct {
    pthread_mutex_t turn, lock; /* turn: one caller at a time */
    pthread_cond_t begin, over;
    pthread_t *members;
    pid_t process; /* that owns the threads: a forked child has none of them */
    int size, busy, leaving;
    uint64_t round;
    Work *work;
    const void *job;
    int64_t pieces, next;
} Team;

static void take_pieces(Team *team)
{
    int64_t piece;
    while ((piece = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED)) < team->pieces) team->work(team->job, piece);
}

static void *member(void *argument)
{
    Team *team = argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&team->lock);
    while (1) {
        while (team->round == seen && !team->leaving) pthread_cond_wait(&team->begin, &team->lock);
        if (team->leaving) break;
        seen = team->round;
        team->busy++;
        pthread_mutex_unlock(&team->lock);
        take_pieces(team);
        pthread_mutex_lock(&team->lock);
        if (--team->busy == 0) pthread_cond_signal(&team->over);
    }
    pthread_mutex_unlock(&team->lock);
    return NULL;
}

/* Starts `threads` threads in addition to the caller's, or fewer where the system allows no more. */
Team *team_new(int threads)
{
    Team *team = calloc(1, sizeof(Team));
    pthread_mutex_init(&team->turn, NULL);
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->begin, NULL);
    pthread_cond_init(&team->over, NULL);
    team->process = getpid();
    team->members = calloc(threads + 1, sizeof(pthread_t));
    while (team->size < threads && pthread_create(&team->members[team->size], NULL, member, team) == 0) team->size++;
    return team;
}

void team_end(Team *team)
{
    if (getpid() != team->process) return;
    pthread_mutex_lock(&team->lock);
    team->leaving = 1;
    pthread_cond_broadcast(&team->begin);
    pthread_mutex_unlock(&team->lock);
    for (int i = 0; i < team->size; i++) pthread_join(team->members[i], NULL);
    free(team->members);
    free(team);
}

static int64_t pieces_of(int64_t n) { return (n + PIECE - 1) / PIECE; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void run_job(Team *team, int64_t pieces, Work *work, const void *job)
{
    if (pieces <= 1 || team->size == 0 || getpid() != team->process) {
        for (int64_t piece = 0; piece < pieces; piece++) work(job, piece);
        return;
    }
    pthread_mutex_lock(&team->turn);
    pthread_mutex_lock(&team->lock);
    while (team->busy) pthread_cond_wait(&team->over, &team->lock); /* a thread that woke late and found no work */
    team->work = work, team->job = job, team->pieces = pieces, team->next = 0;
    team->round++;
    pthread_cond_broadcast(&team->begin);
    pthread_mutex_unlock(&team->lock);
    take_pieces(team);
    pthread_mutex_lock(&team->lock);
    while (team->busy) pthread_cond_wait(&team->over, &team->lock);
    pthread_mutex_unlock(&team->lock);
    pthread_mutex_unlock(&team->turn);
}

/* The arithmetic */

enum { FLOAT32, BFLOAT16, BFLOAT16_STOCHASTIC };

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* Rounds to the nearest bfloat16, ties to even; a NaN stays one. */
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

INLINE void step(int64_t n, float *restrict master, const void *restrict grad, int grads, void *restrict first,
                 void *restrict second, int state, void *restrict weight, int weights, Rule r)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float g = load(grad, i, grads) * r.scale, m = load(first, i, state), v = load(second, i, state);
        float p = master[i] * r.shrink;
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

static int64_t width(int kind) { return kind == FLOAT32 ? 4 : 2; }

/* A job is an array of segments that ends with an empty one; `begin` is the first piece of each. */

typedef struct {
    int64_t begin, n;
    float *master;
    const char *grad;
    char *first, *second, *weight;
    int grads, state, weights;
    Rule rule;
} Stepped;

static void step_piece(const void *job, int64_t piece)
{
    const Stepped *j = job;
    while (j[1].begin <= piece) j++;
    int64_t at = (piece - j->begin) * PIECE, n = least(PIECE, j->n - at), state = at * width(j->state);
    Rule rule = j->rule;
    rule.start += at;
#define STEP(G, S, W) if (j->grads == G && j->state == S && j->weights == W) \
    step(n, j->master + at, j->grad + at * width(G), G, j->first + state, j->second + state, S, \
         j->weight + at * width(W), W, rule)
#define STEPS(G, W) STEP(G, FLOAT32, W); STEP(G, BFLOAT16, W); STEP(G, BFLOAT16_STOCHASTIC, W)
    STEPS(FLOAT32, FLOAT32);
    STEPS(FLOAT32, BFLOAT16);
    STEPS(BFLOAT16, BFLOAT16);
}

void adamw(Team *team, int64_t count, Stepped *job)
{
    for (int64_t i = 0; i < count; i++) job[i + 1].begin = job[i].begin + pieces_of(job[i].n);
    run_job(team, job[count].begin, step_piece, job);
}

INLINE void add_part(int64_t n, void *restrict total, int totals, const void *restrict part, int parts, int first)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float x = load(part, i, parts);
        store(total, i, first ? x : load(total, i, totals) + x, totals, 0);
    }
}

#define SHORT 4096 /* elements whose squares are added in fp32; these sums are added in double */

static float short_sum(int64_t n, const void *x, int kind)
{
    float sum = 0;
    if (kind == FLOAT32) {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; i++) sum += load(x, i, FLOAT32) * load(x, i, FLOAT32);
    } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; i++) sum += load(x, i, BFLOAT16) * load(x, i, BFLOAT16);
    }
    return sum;
}

typedef struct {
    int64_t begin, n;
    char *total;
    const char *part;
    int totals, parts, first;
    double *sums; /* the sum of squares of each piece */
} Added;

/* Adds a piece where there is a part, then sums its squares while it is in the cache. */
static void add_piece(const void *job, int64_t piece)
{
    const Added *j = job;
    while (j[1].begin <= piece) j++;
    piece -= j->begin;
    int64_t end = least(j->n, (piece + 1) * PIECE);
    double all = 0;
    for (int64_t start = piece * PIECE; start < end; start += SHORT) {
        int64_t size = least(SHORT, end - start);
        char *to = j->total + start * width(j->totals);
        const char *from = j->part ? j->part + start * width(j->parts) : NULL;
#define ADD(T, P) if (from && j->totals == T && j->parts == P) { \
            if (j->first) add_part(size, to, T, from, P, 1); \
            else add_part(size, to, T, from, P, 0); \
        }
        ADD(FLOAT32, FLOAT32)
        ADD(FLOAT32, BFLOAT16)
        ADD(BFLOAT16, BFLOAT16)
        all += short_sum(size, to, j->totals);
    }
    j->sums[piece] = all;
}

/* total = part, or total + part, or unchanged where there is no part; `squares` gets each total's sum of squares. */
void add(Team *team, int64_t count, Added *job, double *squares)
{
    for (int64_t i = 0; i < count; i++) job[i + 1].begin = job[i].begin + pieces_of(job[i].n);
    double *sums = calloc(job[count].begin + 1, sizeof(double));
    for (int64_t i = 0; i < count; i++) job[i].sums = sums + job[i].begin;
    run_job(team, job[count].begin, add_piece, job);
    for (int64_t i = 0; i < count; i++) {
        squares[i] = 0;
        for (int64_t piece = 0; piece < pieces_of(job[i].n); piece++) squares[i] += job[i].sums[piece];
    }
    free(sums);
}
