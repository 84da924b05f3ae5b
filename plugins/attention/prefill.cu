// Attention of several new tokens per slot, after what the cache holds already: one kernel appends, the next one attends.
//
// A block has kRows tokens of one query head, a warp kMatrices times 16 of them; keys and values pass by in tiles of kKeys,
// filled ahead. Scores and probabilities stay in registers. Blocks of the last tokens, which see most keys, come first. Where blocks
// are few, the short form, with fewer rows, has more of them.

#include "attention/common.cuh"

constexpr int kAppendBlock = 256;
constexpr float kFar = 8;  // a power of 2: see where it is used

struct Prefill {
    const unsigned char* q;
    long long q_stride, q_token_stride;  // bytes
    const unsigned char* cache;
    long long slot_stride, kv_stride, max_tokens;
    const int *lengths, *new_lengths;
    const float* cos_sin;
    long long rotary_dim;
    unsigned char* out;
    long long width, group, window;
    Score score;
};

// New tokens of a slot that there is room for. Where new_lengths is null, all take part.
__device__ __forceinline__ int tokens_of(const int* lengths, const int* new_lengths, long long slot, long long width, long long max_tokens) {
    const long long past = lengths[slot], wanted = new_lengths ? min(static_cast<long long>(new_lengths[slot]), width) : width;
    return past < 0 ? 0 : static_cast<int>(max(min(wanted, max_tokens - past), 0LL));
}

// Grid: x over words of the new rows of a slot, y over slots. Strides are bytes.
extern "C" __global__ void __launch_bounds__(kAppendBlock)
    attention_append(const unsigned char* k, const unsigned char* v, long long k_stride, long long v_stride, long long k_token_stride,
                     long long v_token_stride, unsigned char* cache, long long slot_stride, long long kv_stride, long long max_tokens,
                     const int* lengths, const int* new_lengths, const float* cos_sin, long long rotary_dim, long long width,
                     long long kv_heads) {
    const long long slot = blockIdx.y, x = static_cast<long long>(blockIdx.x) * kAppendBlock + threadIdx.x;
    const int word = static_cast<int>(x % kWords), token = static_cast<int>(x / (kWords * kv_heads));
    const long long head = x / kWords % kv_heads;
    if (token >= tokens_of(lengths, new_lengths, slot, width, max_tokens)) return;
    const int position = lengths[slot] + token;
    const unsigned char* key = k + slot * k_stride + token * k_token_stride + head * kRowBytes;
    const unsigned char* value = v + slot * v_stride + token * v_token_stride + head * kRowBytes;
    unsigned char* to = cache + slot * slot_stride + (head * max_tokens + position) * kRowBytes + 4 * word;
    *reinterpret_cast<unsigned*>(to) = turned_word(reinterpret_cast<const unsigned*>(key), word, Rotation(cos_sin, rotary_dim, position));
    *reinterpret_cast<unsigned*>(to + kv_stride) = reinterpret_cast<const unsigned*>(value)[word];
}

// Grid: x over query heads, y over tiles of new tokens, z over slots.
template <int kWarps, int kMatrices, int kKeys, int kStages>
__device__ __forceinline__ void prefill(const Prefill& call) {
    constexpr int kBlock = 32 * kWarps, kWarpRows = 16 * kMatrices, kRows = kWarps * kWarpRows, kTileBytes = kKeys * kRowBytes;
    static_assert(kRows * kPieces % kBlock == 0, "each thread loads as many pieces of q");
    DYNAMIC_SHARED(unsigned char, shared);
    unsigned char* const ring = shared + kRows * kRowBytes;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int slot = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.x);
    const int row0 = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kRows;
    const int past = call.lengths[slot], count = tokens_of(call.lengths, call.new_lengths, slot, call.width, call.max_tokens);
    const long long out_stride = static_cast<long long>(gridDim.x) * kRowBytes;
    unsigned char* results = call.out + (slot * call.width + row0) * out_stride + head * kRowBytes;
    if (row0 >= count) {
        for (int x = threadIdx.x; x < kRows * kPieces; x += kBlock) {
            if (row0 + x / kPieces < call.width) *reinterpret_cast<uint4*>(results + x / kPieces * out_stride + x % kPieces * 16) = uint4{};
        }
        return;
    }
    const int rows = min(kRows, count - row0), span = static_cast<int>(call.window > 0 ? min(call.window, 0x7FFFFFFFLL) : 0x7FFFFFFF);
    const int first_position = past + row0, keys_end = first_position + rows;
    const int first_tile = max(first_position - span + 1, 0) / kKeys, last_tile = (keys_end - 1) / kKeys;
    const unsigned char* keys = call.cache + slot * call.slot_stride + head / call.group * call.max_tokens * kRowBytes;

    const auto fill = [&](int tile) {
        const SharedAddress to = shared_address(ring + (tile - first_tile) % kStages * 2 * kTileBytes);
        const unsigned char* source = keys + static_cast<long long>(tile) * kTileBytes;
#pragma unroll
        for (int i = 0; i < (kKeys * kPieces + kBlock - 1) / kBlock; i++) {
            const int x = i * kBlock + threadIdx.x, row = x / kPieces, piece = x % kPieces;
            if (kKeys * kPieces % kBlock && row >= kKeys) break;
            const bool lives = tile * kKeys + row < keys_end;
            const unsigned char* from = source + row * kRowBytes + piece * 16;
            copy_async(to + piece_at(row, piece), from, lives);
            copy_async(to + kTileBytes + piece_at(row, piece), from + call.kv_stride, lives);
        }
    };
    {
        const unsigned char* source = call.q + slot * call.q_stride + row0 * call.q_token_stride + head * kRowBytes;
        const SharedAddress to = shared_address(shared);
#pragma unroll
        for (int i = 0; i < kRows * kPieces / kBlock; i++) {
            const int x = i * kBlock + threadIdx.x, row = x / kPieces, piece = x % kPieces;
            copy_async(to + piece_at(row, piece), source + row * call.q_token_stride + piece * 16, row < rows);
        }
        commit_copies();
    }
#pragma unroll
    for (int stage = 0; stage < kStages - 1; stage++) {
        if (first_tile + stage <= last_tile) fill(first_tile + stage);
        commit_copies();
    }
    wait_for_copies<kStages - 1>();
    __syncthreads();
    const int half = static_cast<int>(call.rotary_dim / 4);  // words
    for (int x = threadIdx.x; x < rows * half; x += kBlock) {
        const int row = x / half;
        turn_in_tile(shared, row, x % half, half, Rotation(call.cos_sin, call.rotary_dim, first_position + row));
    }

    const Score score = call.score;
    float values[kMatrices][kHeadDim / 8][4] = {}, maxima[kMatrices][2], sums[kMatrices][2] = {};
#pragma unroll
    for (int m = 0; m < kMatrices; m++) maxima[m][0] = maxima[m][1] = kLowest;
    const int warp_position = first_position + warp * kWarpRows;  // of this warp's first row
    const LanePieces queries(shared_address(shared + warp * kWarpRows * kRowBytes), lane % 16, lane / 16);
    for (int tile = first_tile; tile <= last_tile; tile++) {
        wait_for_copies<kStages - 2>();
        __syncthreads();
        if (tile + kStages - 1 <= last_tile) fill(tile + kStages - 1);
        commit_copies();
        const int key0 = tile * kKeys;
        const bool some = key0 < warp_position + kWarpRows && warp_position < keys_end && key0 + kKeys > warp_position - span + 1;
        if (!some) continue;
        const SharedAddress tiles = shared_address(ring + (tile - first_tile) % kStages * 2 * kTileBytes);
        const LanePieces key_tile(tiles, lane % 8 + lane / 16 * 8, lane / 8 % 2), value_tile(tiles + kTileBytes, lane % 16, lane / 16);
        float scores[kMatrices][kKeys / 8][4] = {};
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; d++) {
            unsigned left[kMatrices][4];
#pragma unroll
            for (int m = 0; m < kMatrices; m++) load_matrices(left[m], queries(d, 16 * m));
#pragma unroll
            for (int j = 0; j < kKeys / 16; j++) {
                unsigned right[4];
                load_matrices(right, key_tile(d, 16 * j));
#pragma unroll
                for (int m = 0; m < kMatrices; m++) {
                    multiply_add(Element{}, scores[m][2 * j], left[m], right[0], right[1]);
                    multiply_add(Element{}, scores[m][2 * j + 1], left[m], right[2], right[3]);
                }
            }
        }
        if (score.inner != 0) {
#pragma unroll
            for (int m = 0; m < kMatrices; m++) {
#pragma unroll
                for (int j = 0; j < kKeys / 8; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) scores[m][j][e] = score.capped(scores[m][j][e]);
                }
            }
        }
        if (key0 + kKeys - 1 > warp_position || key0 < warp_position + kWarpRows - span) {
#pragma unroll
            for (int m = 0; m < kMatrices; m++) {
#pragma unroll
                for (int j = 0; j < kKeys / 8; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int behind = warp_position + 16 * m + lane / 4 + e / 2 * 8 - (key0 + 8 * j + lane % 4 * 2 + e % 2);
                        if (behind < 0 || behind >= span) scores[m][j][e] = kMasked;
                    }
                }
            }
        }
        // Results stay relative to an older maximum until a score is far above it: a probability of up to 256 is as exact as one of 1.
        float highest[kMatrices][2];
        bool far = false;
#pragma unroll
        for (int m = 0; m < kMatrices; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float maximum = maxima[m][i];
#pragma unroll
                for (int j = 0; j < kKeys / 8; j++) maximum = fmaxf(maximum, fmaxf(scores[m][j][2 * i], scores[m][j][2 * i + 1]));
                highest[m][i] = max_of_four(maximum);
                far = far || (highest[m][i] - maxima[m][i]) * score.factor > kFar;
            }
        }
        if (__any_sync(~0u, far)) {
#pragma unroll
            for (int m = 0; m < kMatrices; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float less = power_of_2((maxima[m][i] - highest[m][i]) * score.factor);
                    maxima[m][i] = highest[m][i];
                    sums[m][i] *= less;
#pragma unroll
                    for (int d = 0; d < kHeadDim / 8; d++) {
                        values[m][d][2 * i] *= less;
                        values[m][d][2 * i + 1] *= less;
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kMatrices; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float shift = maxima[m][i] * score.factor;
#pragma unroll
                for (int j = 0; j < kKeys / 8; j++) {
#pragma unroll
                    for (int e = 2 * i; e < 2 * i + 2; e++) {
                        scores[m][j][e] = power_of_2(scores[m][j][e] * score.factor - shift);
                        sums[m][i] += scores[m][j][e];
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < kKeys / 16; j++) {
            unsigned left[kMatrices][4];
#pragma unroll
            for (int m = 0; m < kMatrices; m++) pack_left(left[m], scores[m][2 * j], scores[m][2 * j + 1]);
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; d++) {
                unsigned right[4];
                load_matrices_transposed(right, value_tile(d, 16 * j));
#pragma unroll
                for (int m = 0; m < kMatrices; m++) {
                    multiply_add(Element{}, values[m][2 * d], left[m], right[0], right[1]);
                    multiply_add(Element{}, values[m][2 * d + 1], left[m], right[2], right[3]);
                }
            }
        }
    }
    wait_for_copies<0>();

    // A warp's results take the place of its queries, and leave in pieces of 16 bytes.
    unsigned char* const own = shared + warp * kWarpRows * kRowBytes;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kMatrices; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float one_of = reciprocal(sum_of_four(sums[m][i]));
            const int row = 16 * m + lane / 4 + 8 * i;
#pragma unroll
            for (int d = 0; d < kHeadDim / 8; d++) {
                *reinterpret_cast<unsigned*>(own + piece_at(row, d) + lane % 4 * 4) =
                    pack(Element{}, {values[m][d][2 * i] * one_of, values[m][d][2 * i + 1] * one_of});
            }
        }
    }
    __syncwarp();
    for (int x = lane; x < kWarpRows * kPieces; x += 32) {
        const int row = x / kPieces, piece = x % kPieces, token = row0 + warp * kWarpRows + row;
        if (token >= call.width) continue;
        const uint4 words = token < count ? *reinterpret_cast<const uint4*>(own + piece_at(row, piece)) : uint4{};
        *reinterpret_cast<uint4*>(results + (warp * kWarpRows + row) * out_stride + piece * 16) = words;
    }
}

#define PARAMETERS                                                                                                                       \
    const unsigned char *q, long long q_stride, long long q_token_stride, const unsigned char *cache, long long slot_stride,             \
        long long kv_stride, long long max_tokens, const int *lengths, const int *new_lengths, const float *cos_sin, long long rotary_dim, \
        unsigned char *out, long long width, long long group, long long window, double factor, double inner
#define CALL                                                                                                                              \
    {q, q_stride, q_token_stride, cache, slot_stride, kv_stride, max_tokens, lengths, new_lengths, cos_sin, rotary_dim, out, width, group, \
     window, {factor, inner}}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) attention_prefill(PARAMETERS) { prefill<WARPS, MATRICES, KEYS, STAGES>(CALL); }
extern "C" __global__ void __launch_bounds__(32 * SHORT_WARPS, SHORT_BLOCKS) attention_prefill_short(PARAMETERS) {
    prefill<SHORT_WARPS, SHORT_MATRICES, SHORT_KEYS, STAGES>(CALL);
}
