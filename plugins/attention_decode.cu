// Attention of one new token per slot, RoPE and append included, in one launch.
//
// The query heads of a K/V head are the rows of one matrix, so K and V are read once for all of them. Work is counted in tiles:
// kTokens tokens of one head of one slot, for one warp. If heads have about the same length, each block has an equal part of one
// head, or some heads; else all tiles of all heads and slots stand in one line, and each block takes an equal part of it. Lengths
// are read here, so the launch depends on shapes alone. A head that several blocks have parts of is put together by the one that
// comes last. Each warp has a ring of tiles in shared memory, filled ahead and over the end of a head, q and the angles too.

#include "attention.cuh"

constexpr int kWarps = WARPS, kStages = STAGES, kTokens = TOKENS;
constexpr int kBlock = 32 * kWarps, kTileBytes = kTokens * kRowBytes;
// Tiles: the fewest that are worth a block; and as many as one loads while it goes from one head to another.
constexpr int kLeast = LEAST, kCrossing = CROSSING;
constexpr int kChains = CHAINS;   // sums of products that do not wait for each other
constexpr int kAtOnce = 8;       // partial results that a thread reads

struct Decode {
    const unsigned char *q, *k, *v;           // rows of the heads, dense
    long long q_stride, k_stride, v_stride;   // bytes from slot to slot
    unsigned char* cache;
    long long slot_stride, kv_stride;         // bytes
    int max_tokens;                           // rows of a head
    const int *lengths, *new_lengths;         // the latter may be null: 1 for all
    const float* cos_sin;                     // [max_tokens or more, 2, rotary_dim / 2]
    int rotary_dim;
    unsigned char* out;                       // [slots, kv_heads, group, kHeadDim]
    float* partials;                          // [gridDim.x, 2, group, kHeadDim + 4]
    unsigned* tickets;                        // [slots, kv_heads], 0 before and after
    int slots, kv_heads, group, window;
    double scale, softcap;
};

// A tile of one head of one slot.
struct Place {
    int slot, head, tile;
    int position, first_key, first_tile, tiles;  // position: of the new token; below 0: there is none

    __device__ __forceinline__ void read_slot(const Decode& call) {
        position = call.lengths[slot];
        const bool takes_part = !call.new_lengths || call.new_lengths[slot] > 0;
        if (!takes_part || position >= call.max_tokens) position = -1;
        first_key = call.window > 0 ? max(0, position - call.window + 1) : 0;
        first_tile = position < 0 ? 0 : first_key / kTokens;
        tiles = position < 0 ? 1 : position / kTokens + 1 - first_tile;
    }
    // The first token of a warp's tile, if this is the tile of warp 0.
    __device__ __forceinline__ int token(int warp) const { return (first_tile + tile + warp) * kTokens; }
};

// Tiles of a head of slot `slot`; 0 behind the last slot.
__device__ __forceinline__ int tiles_of(const Decode& call, int slot) {
    if (slot >= call.slots) return 0;
    Place place{slot, 0, 0, 0, 0, 0, 0};
    place.read_slot(call);
    return place.tiles;
}

// What is this block's: tiles begin to end of the line, and the place of the first. Every warp finds it by itself.
struct Part {
    int share, begin, end;  // share: tiles of each block
    int base;               // the block whose part begins at 0
    Place first;

    __device__ __forceinline__ explicit Part(const Decode& call) : begin(0), end(0), base(0), first{} {
        const int lane = threadIdx.x % 32, block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
        const int kv_heads = call.kv_heads, heads = call.slots * kv_heads;
        int total = 0, most = 0;
#pragma unroll 1
        for (int slot = lane; slot - lane < call.slots; slot += 32) {
            const int tiles = tiles_of(call, slot);
            total += tiles;
            most = max(most, tiles);
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            total += __shfl_xor_sync(~0u, total, distance);
            most = max(most, __shfl_xor_sync(~0u, most, distance));
        }
        share = max((total * kv_heads + blocks - 1) / blocks, kLeast);
        const int parts = blocks / heads, several = (heads + blocks - 1) / blocks;
        const int even = parts > 0 ? max((most + parts - 1) / parts, kLeast) : most * several;
        if (even > share + kCrossing) {
            in_line(call, total * kv_heads);
            return;
        }
        share = even;
        const int head = parts > 0 ? block / parts : block * several;
        if (head >= heads) return;
        first.slot = head / kv_heads;
        first.head = head % kv_heads;
        first.read_slot(call);
        if (parts > 0) {
            base = head * parts;
            begin = first.tile = (block - base) * share;
            end = min(begin + share, first.tiles);
        } else {
#pragma unroll 1
            for (int other = head; other < min(head + several, heads); other++) end += tiles_of(call, other / kv_heads);
        }
    }

    __device__ __forceinline__ void in_line(const Decode& call, int total) {
        const int lane = threadIdx.x % 32, kv_heads = call.kv_heads;
        begin = static_cast<int>(blockIdx.x) * share;
        end = min(total, begin + share);
        if (begin >= end) return;
        int before = 0;
#pragma unroll 1
        for (int slot = 0;; slot += 32) {
            const int own = tiles_of(call, slot + lane) * kv_heads;
            int sum = own;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int lower = __shfl_up_sync(~0u, sum, distance);
                sum += lane >= distance ? lower : 0;
            }
            const unsigned beyond = __ballot_sync(~0u, before + sum > begin);
            if (beyond) {
                int found = 0;
#pragma unroll 1
                while (!(beyond >> found & 1)) found++;
                before += __shfl_sync(~0u, sum - own, found);
                first.slot = slot + found;
                break;
            }
            before += __shfl_sync(~0u, sum, 31);
        }
        first.read_slot(call);
        first.head = (begin - before) / first.tiles;
        first.tile = (begin - before) % first.tiles;
    }
};

// A way through a part, kWarps tiles of a head at once.
struct Walk {
    Place at;
    int done, head;  // head: which of kStages places in shared memory it has

    __device__ __forceinline__ explicit Walk(const Part& part) : at(part.first), done(part.begin), head(0) {}

    __device__ __forceinline__ bool begins(const Part& part) const { return at.tile == 0 || done == part.begin; }
    __device__ __forceinline__ int count(const Part& part) const { return min(kWarps, min(part.end - done, at.tiles - at.tile)); }
    __device__ __forceinline__ void advance(const Decode& call, int count) {
        done += count;
        at.tile += count;
        if (at.tile < at.tiles) return;
        at.tile = 0;
        head = head + 1 == kStages ? 0 : head + 1;
        if (++at.head < call.kv_heads) return;
        at.head = 0;
        if (++at.slot < call.slots) at.read_slot(call);
    }
};

// What a warp has of a head: rows of the query heads, each lane row lane / 4 (and + 8), relative to their maxima.
template <int kRows>
struct Running {
    float values[kHeadDim / 8][4];
    float maxima[kRows / 8], sums[kRows / 8];  // sums: of this lane's columns

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; d++) {
#pragma unroll
            for (int i = 0; i < 4; i++) values[d][i] = 0;
        }
#pragma unroll
        for (int i = 0; i < kRows / 8; i++) {
            maxima[i] = kLowest;
            sums[i] = 0;
        }
    }
    // To a higher maximum of the row.
    __device__ __forceinline__ void raise(int i, float maximum, float factor) {
        const float less = power_of_2((maxima[i] - maximum) * factor);
        maxima[i] = maximum;
        sums[i] *= less;
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; d++) {
            values[d][2 * i] *= less;
            values[d][2 * i + 1] *= less;
        }
    }
};

// What is in shared memory. kernels/attention_tiles.py counts the same bytes.
template <int kRows>
struct Shared {
    static_assert(kRows <= kTokens, "what a warp has of a head takes the place of a tile");
    unsigned char* ring;   // [kWarps][kStages][K, V] tiles
    unsigned char* heads;  // [kStages]: kRows rows of q, one of k, one of v; and two for the angles
    unsigned char* fresh;  // K and V of the new token
    float* maxima;         // [kWarps][kRows]
    float* sums;
    unsigned* ticket;

    __device__ __forceinline__ explicit Shared(unsigned char* start) {
        ring = start;
        heads = ring + kWarps * kStages * 2 * kTileBytes;
        fresh = heads + kStages * (kRows + 4) * kRowBytes;
        maxima = reinterpret_cast<float*>(fresh + 2 * kRowBytes);
        sums = maxima + kWarps * kRows;
        ticket = reinterpret_cast<unsigned*>(sums + kWarps * kRows);
    }
    __device__ __forceinline__ unsigned char* tile(int warp, int stage) const { return ring + (warp * kStages + stage) * 2 * kTileBytes; }
    __device__ __forceinline__ unsigned char* head(int number) const { return heads + number * (kRows + 4) * kRowBytes; }
    // Four, or two, of what a warp has of a row.
    __device__ __forceinline__ float* values(int warp, int stage, unsigned row, unsigned column) const {
        return reinterpret_cast<float*>(tile(warp, stage)) + row * kHeadDim + (column ^ row % kSpread * 8);
    }
};

// A row's results of several parts, relative to their maximum.
struct Together {
    float maximum = kLowest, sum = 0;
    float4 value{0, 0, 0, 0};

    __device__ __forceinline__ void raise(float other, float factor) {
        const float less = power_of_2((maximum - other) * factor);
        maximum = other;
        sum *= less;
        value = {value.x * less, value.y * less, value.z * less, value.w * less};
    }
    __device__ __forceinline__ void add(float weight, float part_sum, float4 part) {
        sum += weight * part_sum;
        value = {value.x + weight * part.x, value.y + weight * part.y, value.z + weight * part.z, value.w + weight * part.w};
    }
};

// Puts together what the warps have, in the place of the tiles of `stage`, and calls emit(row, column, Together).
template <int kRows, class Emit>
__device__ __forceinline__ void put_together(const Shared<kRows>& shared, int stage, const Running<kRows>& running, int group, float factor,
                                             Emit emit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRows / 8; i++) {
        const float sum = sum_of_four(running.sums[i]);
        const int row = lane / 4 + 8 * i;
        if (lane % 4 == 0) {
            shared.maxima[warp * kRows + row] = running.maxima[i];
            shared.sums[warp * kRows + row] = sum;
        }
#pragma unroll
        for (int d = 0; d < kHeadDim / 8 && row < group; d++) {
            *reinterpret_cast<float2*>(shared.values(warp, stage, row, 8 * d + lane % 4 * 2)) = {running.values[d][2 * i], running.values[d][2 * i + 1]};
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int x = threadIdx.x; x < group * (kHeadDim / 4); x += kBlock) {
        const int row = x / (kHeadDim / 4), column = x % (kHeadDim / 4) * 4;
        Together together;
#pragma unroll
        for (int other = 0; other < kWarps; other++) together.maximum = fmaxf(together.maximum, shared.maxima[other * kRows + row]);
#pragma unroll
        for (int other = 0; other < kWarps; other++) {
            together.add(power_of_2((shared.maxima[other * kRows + row] - together.maximum) * factor), shared.sums[other * kRows + row],
                         *reinterpret_cast<const float4*>(shared.values(other, stage, row, column)));
        }
        emit(row, column, together);
    }
}

template <int kRows>
__device__ __forceinline__ void decode(const Decode& call) {
    DYNAMIC_SHARED(unsigned char, start);
    const Shared<kRows> shared(start);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = call.group;
    const Score score(call.scale, call.softcap);
    const Part part(call);
    if (part.begin >= part.end) return;

    Walk ahead(part), walk(part);
    // What comes next, if anything does.
    const auto fill = [&](int stage) {
        const Place& place = ahead.at;
        const int count = ahead.count(part), token = place.token(warp);
        if (count > 0 && place.position >= 0) {
            if (ahead.begins(part)) {
                const SharedAddress to = shared_address(shared.head(ahead.head));
                const int pieces = (group + 2) * kPieces;
#pragma unroll 1
                for (int x = threadIdx.x; x < pieces + call.rotary_dim / 4; x += kBlock) {
                    const int row = x / kPieces, offset = x % kPieces * 16;
                    if (row < group) {
                        copy_async(to + piece_at(row, x % kPieces), call.q + place.slot * call.q_stride + (place.head * group + row) * kRowBytes + offset, true);
                    } else if (row == group) {
                        copy_async(to + kRows * kRowBytes + offset, call.k + place.slot * call.k_stride + place.head * kRowBytes + offset, true);
                    } else if (x < pieces) {
                        copy_async(to + (kRows + 1) * kRowBytes + offset, call.v + place.slot * call.v_stride + place.head * kRowBytes + offset, true);
                    } else {
                        copy_async(to + (kRows + 2) * kRowBytes + (x - pieces) * 16, call.cos_sin + static_cast<long long>(place.position) * call.rotary_dim + (x - pieces) * 4, true);
                    }
                }
            }
            if (warp < count) {
                const unsigned char* keys = call.cache + place.slot * call.slot_stride + (static_cast<long long>(place.head) * call.max_tokens + token) * kRowBytes;
                const SharedAddress tile = shared_address(shared.tile(warp, stage));
#pragma unroll
                for (int i = 0; i < kTokens * kPieces / 32; i++) {
                    const int row = (i * 32 + lane) / kPieces, piece = (i * 32 + lane) % kPieces;
                    const bool lives = token + row < place.position;
                    const unsigned char* from = keys + row * kRowBytes + piece * 16;
                    copy_async(tile + piece_at(row, piece), from, lives);
                    copy_async(tile + kTileBytes + piece_at(row, piece), from + call.kv_stride, lives);
                }
            }
        }
        commit_copies();
        if (count > 0) ahead.advance(call, count);
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; stage++) fill(stage);

    unsigned queries[kHeadDim / 16][kRows / 4];
    Running<kRows> running;
    int stage = 0;
    for (int count; walk.done < part.end; walk.advance(call, count)) {
        const Place& at = walk.at;
        count = walk.count(part);
        const int from = walk.done - at.tile, to = from + at.tiles;  // the whole head
        unsigned char* out = call.out + static_cast<long long>(at.slot * call.kv_heads + at.head) * group * kRowBytes;
        wait_for_copies<kStages - 2>();
        __syncwarp();
        if (walk.begins(part)) {
            __syncthreads();
            unsigned char* const head = shared.head(walk.head);
            const unsigned* key = reinterpret_cast<const unsigned*>(head + kRows * kRowBytes);
            const Rotation rotation(reinterpret_cast<const float*>(head + (kRows + 2) * kRowBytes), call.rotary_dim, 0);
            const int half = call.rotary_dim / 4;  // words
#pragma unroll 1
            for (int x = threadIdx.x; x < group * half && at.position >= 0; x += kBlock) turn_in_tile(head, x / half, x % half, half, rotation);
#pragma unroll 1
            for (int x = kBlock - 1 - threadIdx.x; x < kWords && at.position >= 0; x += kBlock) {
                unsigned* fresh = reinterpret_cast<unsigned*>(shared.fresh) + x;
                unsigned char* appended = call.cache + at.slot * call.slot_stride + (static_cast<long long>(at.head) * call.max_tokens + at.position) * kRowBytes + 4 * x;
                fresh[0] = turned_word(key, x, rotation);
                fresh[kWords] = key[kWords + x];
                if (to > part.end) continue;  // whoever has the last tile appends
                *reinterpret_cast<unsigned*>(appended) = fresh[0];
                *reinterpret_cast<unsigned*>(appended + call.kv_stride) = fresh[kWords];
            }
            __syncthreads();
            const SharedAddress rows = shared_address(head);
            unsigned loaded[4];
            if constexpr (kRows == 8) {
#pragma unroll
                for (int d = 0; d < kHeadDim / 16; d += 2) {
                    load_matrices(loaded, rows + piece_at(lane % 8, min(2 * d + lane / 8, kPieces - 1)));
#pragma unroll
                    for (int part_of = 0; part_of < 4 && 2 * d + part_of < kPieces; part_of++) queries[d + part_of / 2][part_of % 2] = loaded[part_of];
                }
            } else {
#pragma unroll
                for (int d = 0; d < kHeadDim / 16; d++) load_matrices(queries[d], rows + piece_at(lane % 16, 2 * d + lane / 16));
            }
            running.clear();
        }
        fill(stage == 0 ? kStages - 1 : stage - 1);
        const int token = at.token(warp);
        if (warp < count && at.position >= 0) {
            unsigned char* tile = shared.tile(warp, stage);
            if (at.position < token + kTokens) {  // the new token is here
                for (int x = lane; x < 2 * kPieces; x += 32) {
                    const unsigned offset = piece_at(at.position - token, x % kPieces) + x / kPieces * kTileBytes;
                    *reinterpret_cast<uint4*>(tile + offset) = reinterpret_cast<const uint4*>(shared.fresh)[x];
                }
                __syncwarp();
            }
            const LanePieces keys(shared_address(tile), lane % 8 + lane / 16 * 8, lane / 8 % 2);
            const LanePieces values(shared_address(tile + kTileBytes), lane % 16, lane / 16);
            float sums[kChains][kTokens / 8][4] = {};
#pragma unroll
            for (int j = 0; j < kTokens / 16; j++) {
#pragma unroll
                for (int d = 0; d < kHeadDim / 16; d++) {
                    unsigned right[4];
                    load_matrices(right, keys(d, 16 * j));
                    unsigned left[4] = {queries[d][0], kRows == 8 ? 0 : queries[d][1], queries[d][kRows / 8], kRows == 8 ? 0 : queries[d][kRows / 4 - 1]};
                    multiply_add(Element{}, sums[d % kChains][2 * j], left, right[0], right[1]);
                    multiply_add(Element{}, sums[d % kChains][2 * j + 1], left, right[2], right[3]);
                }
            }
            auto& scores = sums[0];
#pragma unroll
            for (int chain = 1; chain < kChains; chain++) {
#pragma unroll
                for (int x = 0; x < kTokens / 2; x++) scores[x / 4][x % 4] += sums[chain][x / 4][x % 4];
            }
            const bool at_an_edge = token + kTokens > at.position || token < at.first_key;
#pragma unroll
            for (int i = 0; i < kRows / 8; i++) {
                float maximum = running.maxima[i];
#pragma unroll
                for (int j = 0; j < kTokens / 8; j++) {
#pragma unroll
                    for (int e = 2 * i; e < 2 * i + 2; e++) {
                        if (score.inner != 0) scores[j][e] = score.capped(scores[j][e]);
                        if (at_an_edge) {
                            const int key = token + 8 * j + lane % 4 * 2 + e % 2;
                            if (key > at.position || key < at.first_key) scores[j][e] = kMasked;
                        }
                        maximum = fmaxf(maximum, scores[j][e]);
                    }
                }
                maximum = max_of_four(maximum);
                running.raise(i, maximum, score.factor);
#pragma unroll
                for (int j = 0; j < kTokens / 8; j++) {
#pragma unroll
                    for (int e = 2 * i; e < 2 * i + 2; e++) {
                        scores[j][e] = power_of_2(scores[j][e] * score.factor - maximum * score.factor);
                        running.sums[i] += scores[j][e];
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < kTokens / 16; j++) {
                unsigned left[4];
                pack_left(left, scores[2 * j], scores[2 * j + 1]);
#pragma unroll
                for (int d = 0; d < kHeadDim / 16; d++) {
                    unsigned right[4];
                    load_matrices_transposed(right, values(d, 16 * j));
                    multiply_add(Element{}, running.values[2 * d], left, right[0], right[1]);
                    multiply_add(Element{}, running.values[2 * d + 1], left, right[2], right[3]);
                }
            }
        }
        const int used = stage;
        stage = stage + 1 == kStages ? 0 : stage + 1;
        if (at.tile + count < at.tiles && walk.done + count < part.end) continue;
        // The end of this head, or of what this block has of it.
        if (at.position < 0) {
#pragma unroll 1
            for (int x = threadIdx.x; x < group * kPieces; x += kBlock) reinterpret_cast<uint4*>(out)[x] = uint4{};
            continue;
        }
        const auto store = [&](int row, int column, const Together& all) {
            const float one_of = reciprocal(all.sum);
            *reinterpret_cast<uint2*>(out + row * kRowBytes + 2 * column) = {pack(Element{}, {all.value.x * one_of, all.value.y * one_of}),
                                                                             pack(Element{}, {all.value.z * one_of, all.value.w * one_of})};
        };
        if (part.begin <= from && to <= part.end) {
            put_together(shared, used, running, group, score.factor, store);
            continue;
        }
        const int first = part.base + from / part.share, last = part.base + (to - 1) / part.share;
        const auto partial = [&](int block, int row) { return call.partials + ((2 * block + (block == first)) * group + row) * (kHeadDim + 4); };
        put_together(shared, used, running, group, score.factor, [&](int row, int column, const Together& all) {
            float* mine = partial(static_cast<int>(blockIdx.x), row);
            *reinterpret_cast<float4*>(mine + column) = all.value;
            if (column == 0) *reinterpret_cast<float2*>(mine + kHeadDim) = {all.maximum, all.sum};
        });
        __syncthreads();
        const unsigned others = last - first;
        if (threadIdx.x == 0) *shared.ticket = take_ticket(call.tickets + at.slot * call.kv_heads + at.head, others);
        __syncthreads();
        if (*shared.ticket != others) continue;
#pragma unroll 1
        for (int x = threadIdx.x; x < group * (kHeadDim / 4); x += kBlock) {
            const int row = x / (kHeadDim / 4), column = x % (kHeadDim / 4) * 4;
            Together together;
#pragma unroll 1
            for (int block = first; block <= last; block += kAtOnce) {
                float4 values[kAtOnce];
                float2 weights[kAtOnce];  // maximum and sum
#pragma unroll
                for (int i = 0; i < kAtOnce; i++) {
                    const float* theirs = partial(min(block + i, last), row);
                    values[i] = *reinterpret_cast<const float4*>(theirs + column);
                    weights[i] = *reinterpret_cast<const float2*>(theirs + kHeadDim);
                }
                float maximum = together.maximum;
#pragma unroll
                for (int i = 0; i < kAtOnce; i++) maximum = fmaxf(maximum, weights[i].x);
                together.raise(maximum, score.factor);
#pragma unroll
                for (int i = 0; i < kAtOnce; i++) {
                    together.add(block + i <= last ? power_of_2((weights[i].x - maximum) * score.factor) : 0, weights[i].y, values[i]);
                }
            }
            store(row, column, together);
        }
    }
    wait_for_copies<0>();
}

#ifndef NO_DECODE_KERNELS
#define PARAMETERS                                                                                                                   \
    const unsigned char *q, const unsigned char *k, const unsigned char *v, long long q_stride, long long k_stride, long long v_stride, \
        unsigned char *cache, long long slot_stride, long long kv_stride, long long max_tokens, const int *lengths,                  \
        const int *new_lengths, const float *cos_sin, long long rotary_dim, unsigned char *out, float *partials, unsigned *tickets,  \
        long long slots, long long kv_heads, long long group, long long window, double scale, double softcap
#define CALL                                                                                                                          \
    {q, k, v, q_stride, k_stride, v_stride, cache, slot_stride, kv_stride, static_cast<int>(max_tokens), lengths, new_lengths, cos_sin, \
     static_cast<int>(rotary_dim), out, partials, tickets, static_cast<int>(slots), static_cast<int>(kv_heads), static_cast<int>(group), \
     static_cast<int>(min(window, 0x7FFFFFFFLL)), scale, softcap}

// Up to 8 query heads for a K/V head, and up to 16.
extern "C" __global__ void __launch_bounds__(kBlock, BLOCKS) attention_decode_8(PARAMETERS) { decode<8>(CALL); }
extern "C" __global__ void __launch_bounds__(kBlock, BLOCKS) attention_decode_16(PARAMETERS) { decode<16>(CALL); }
#endif
