// Attention of one new token per slot, RoPE and append included, in one launch.
//
// The query heads of a K/V head are the rows of one matrix, so K and V are read once for all of them. Work is counted in tiles:
// kTokens tokens of one head of one slot, for one warp. If heads have about the same length, each block has an equal part of one
// head (its first tiles, known without lengths, and a part of the rest), or some heads; else all tiles of all heads and slots stand in
// one line, and each block takes an equal part of it. Lengths are read here, so the launch depends on shapes alone. Blocks that have
// parts of one head put them together, each some columns of all (split_kv_reduce.cuh); in the line the one that has the end does.
// Each warp has a ring of tiles in shared memory, filled ahead and over the end of a head, q and the angles too. The new token is in no
// tile: the warp that begins with it has it in registers.

#include "attention/split_kv_reduce.cuh"

constexpr int kWarps = WARPS, kStages = STAGES, kTokens = TOKENS;
constexpr int kBlock = 32 * kWarps, kTileBytes = kTokens * kRowBytes;
constexpr int kSlots = 2 * kStages - 1;  // of a warp's ring: K and V of the tiles that are on their way, and one that is worked on
static_assert(kTokens >= 16, "a slot is a place for results of 8 rows");
static_assert(LEAST % WARPS == 0, "a block passes tiles of others over between two steps");
// Tiles: the fewest that are worth a block, which are its first ones; and as many as one loads in the time that the line costs it, and
// one more for each query head, for there one block alone puts the end of a head together.
constexpr int kLeast = LEAST, kCrossing = CROSSING;
// Of a lane's pieces of a tile, those that are fetched before lengths are known: 32 KiB of a block.
constexpr int kGuessed = kTokens * kPieces < 2048 / kWarps ? kTokens * kPieces / 32 : 64 / kWarps;
constexpr int kChains = CHAINS;           // sums of products that do not wait for each other

struct Decode {
    const int *lengths, *new_lengths;  // the latter may be null: 1 for all
    int max_tokens, window;            // rows of a head
    int slots, kv_heads;
    int parts, several;  // blocks of a head, or 0 and heads of a block, if all heads are about as long
    int group;
    unsigned char* cache;
    long long slot_stride, kv_stride;  // bytes
    const unsigned char* q;            // rows of the heads, dense
    long long q_stride;                // bytes from slot to slot
    const unsigned char* k;
    long long k_stride;
    const unsigned char* v;
    long long v_stride;
    const float* cos_sin;  // [max_tokens or more, 2, rotary_dim / 2]
    int rotary_dim;
    Score score;
    unsigned char* out;  // [slots, kv_heads, group, kHeadDim]
    float4 *partials, *kept;  // what Sharing says
};

// A tile of one head of one slot.
struct Place {
    int slot, head, tile;
    int position, first_key, first_tile, tiles;  // position: of the new token; below 0: there is none

    __device__ __forceinline__ void read_slot(const Decode& call) { read(call, call.lengths[slot], call.new_lengths ? call.new_lengths[slot] : 1); }
    __device__ __forceinline__ void read(const Decode& call, int length, int new_length) {
        position = new_length > 0 && length < call.max_tokens ? max(length, -1) : -1;
        first_key = call.window > 0 ? max(0, position - (call.window - 1)) : 0;
        first_tile = position < 0 ? 0 : first_key / kTokens;
        tiles = max((position + kTokens - 1) / kTokens - first_tile, 1);
    }
    // The first token of a warp's tile, if this is the tile of warp 0.
    __device__ __forceinline__ int token(int warp) const { return (first_tile + tile + warp) * kTokens; }
};

// Tiles of a head of slot `slot`; 0 behind the last slot.
__device__ __forceinline__ int tiles_of(const Decode& call, int slot) {
    Place place{min(slot, call.slots - 1), 0, 0, 0, 0, 0, 0};
    place.read_slot(call);
    return slot < call.slots ? place.tiles : 0;
}

// What is this block's: tiles begin to end of the line, and the place of the first. Every warp finds it by itself.
struct Part {
    int share = 1, begin = 0, end = 0;  // share: tiles of each block, if they stand in one line
    int base = 0;                       // the block whose part begins at 0, if heads are about as long
    int gap_at = -1, gap = 0;           // where tiles of others are passed over, and how many
    bool even = true;                   // heads are about as long
    Place first{};

    // prefetch(slot, head, tile, lives) and guess(): of the block's first tiles, if heads are about as long.
    template <class Prefetch, class Guess>
    __device__ __forceinline__ Part(const Decode& call, const Prefetch& prefetch, const Guess& guess) {
        const int lane = threadIdx.x % 32, block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
        const int kv_heads = call.kv_heads, heads = call.slots * kv_heads, parts = call.parts, several = call.several;
        const int head = min(parts > 0 ? quotient(block, parts) : block * several, heads);
        const int slot = quotient(min(head, heads - 1), kv_heads), tile = parts > 0 ? (block - head * parts) * kLeast : 0;
        const bool lives = head < heads && call.window == 0;
        prefetch(slot, head - slot * kv_heads, tile, lives);
        wait_for_launches_before();
        // The way to the lengths is the longest here: what needs none of them is done meanwhile.
        const int nearest = min(lane, call.slots - 1), length = call.lengths[nearest], new_length = call.new_lengths ? call.new_lengths[nearest] : 1;
        const int own_length = call.lengths[slot], own_new_length = call.new_lengths ? call.new_lengths[slot] : 1;
        guess(slot, head - slot * kv_heads, tile, lives);
        first = {nearest, 0, 0, 0, 0, 0, 0};
        first.read(call, length, new_length);
        int total = lane < call.slots ? first.tiles : 0, most = total;
        first = {slot, head - slot * kv_heads, 0, 0, 0, 0, 0};
        first.read(call, own_length, own_new_length);
#pragma unroll 1
        for (int other = lane + 32; other - lane < call.slots; other += 32) {
            const int tiles = tiles_of(call, other);
            total += tiles;
            most = max(most, tiles);
        }
        total = sum_of_warp(total) * kv_heads;
        most = max_of_warp(most);
        const float longest = static_cast<float>(most) * several * blocks, mean = static_cast<float>(total) + (kCrossing + call.group) * blocks;
        if (__builtin_expect(longest > mean * max(parts, 1), 0)) {
            even = false;
            in_line(call, total);
            return;
        }
        if (head == heads) return;
        base = head * parts;
        if (parts > 0) {
            const int number = block - base, rest = first.tiles - parts * kLeast, each = rest > 0 ? quotient(rest, parts) : 0;
            begin = first.tile = number * kLeast;
            end = min(begin + kLeast, first.tiles);
            if (rest > 0) {
                const int more = rest - each * parts;  // blocks that have one tile more: the last ones
                const int before = number * each + max(number - (parts - more), 0), own = each + (number >= parts - more);
                if (own > 0) {
                    gap_at = end;
                    gap = parts * kLeast + before - end;
                    end += gap + own;
                }
            }
        } else {
#pragma unroll 1
            for (int other = head; other < min(head + several, heads); other++) end += tiles_of(call, other / kv_heads);
        }
    }

    __device__ __forceinline__ void in_line(const Decode& call, int total) {
        const int lane = threadIdx.x % 32, kv_heads = call.kv_heads, blocks = static_cast<int>(gridDim.x);
        share = max((total + blocks - 1) / blocks, kLeast);
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
    __device__ __forceinline__ void advance(const Decode& call, const Part& part, int count) {
        done += count;
        at.tile += count;
        if (done == part.gap_at) {
            done += part.gap;
            at.tile += part.gap;
        }
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
    // With the new token, whose probability is 1 as yet.
    __device__ __forceinline__ void begin(const unsigned char* rows, const unsigned char* fresh, const Score& score) {
        const int lane = threadIdx.x % 32;
        const unsigned *key = reinterpret_cast<const unsigned*>(fresh), *value = key + kWords;
#pragma unroll
        for (int i = 0; i < kRows / 8; i++) {
            float product = 0;
#pragma unroll
            for (int d = 0; d < kPieces; d++) {
                const float2 x = unpack(Element{}, *reinterpret_cast<const unsigned*>(rows + piece_at(lane / 4 + 8 * i, d) + lane % 4 * 4));
                const float2 y = unpack(Element{}, key[4 * d + lane % 4]), z = unpack(Element{}, value[4 * d + lane % 4]);
                product += x.x * y.x + x.y * y.y;
                values[d][2 * i] = z.x;
                values[d][2 * i + 1] = z.y;
            }
            product = sum_of_four(product);
            maxima[i] = score.inner != 0 ? score.capped(product) : product;
            sums[i] = lane % 4 ? 0.0f : 1.0f;
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
    unsigned char* ring;   // [kWarps][kSlots] tiles of K, then V, in turns
    unsigned char* heads;  // [kStages]: kRows rows of q, one of k, one of v; and two for the angles
    unsigned char* fresh;  // K and V of the new token
    float2* totals;        // [kWarps][kRows]: maximum and sum

    __device__ __forceinline__ explicit Shared(unsigned char* start) {
        ring = start;
        heads = ring + kWarps * kSlots * kTileBytes;
        fresh = heads + kStages * (kRows + 4) * kRowBytes;
        totals = reinterpret_cast<float2*>(fresh + 2 * kRowBytes);
    }
    __device__ __forceinline__ unsigned char* tile(int warp, int slot) const { return ring + (warp * kSlots + slot) * kTileBytes; }
    __device__ __forceinline__ unsigned char* head(int number) const { return heads + number * (kRows + 4) * kRowBytes; }
};

// Puts together what the warps have, in a slot that is free, and calls emit(unit, piece, Together).
template <int kRows, class Emit>
__device__ __forceinline__ void put_together(const Shared<kRows>& shared, int slot, const Running<kRows>& running, int group, float factor,
                                             Emit emit) {
    constexpr int kRound = kRows < kTokens / 2 ? kRows : kTokens / 2;  // rows that a slot has room for: 32 pieces of 8 rows of a unit
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int at_once = kUnits > kWarps && group <= 4 ? 2 : 1;  // units of a warp
#pragma unroll
    for (int i = 0; i < kRows / 8; i++) {
        const float sum = sum_of_four(running.sums[i]);
        if (lane % 4) continue;
        shared.totals[warp * kRows + lane / 4 + 8 * i] = {running.maxima[i], sum};
    }
#pragma unroll
    for (int row0 = 0; row0 < kRows; row0 += kRound) {
        if (row0) __syncthreads();
        __syncwarp();
#pragma unroll
        for (int x = 0; x < kUnits * kRound / 8; x++) {
            const int unit = x % kUnits, i = row0 / 8 + x / kUnits;
            const auto &low = running.values[2 * unit], &high = running.values[2 * unit + 1];
            if (lane / 4 + 8 * i >= group) continue;
            reinterpret_cast<float4*>(shared.tile(warp, slot))[32 * x + lane] = {low[2 * i], low[2 * i + 1], high[2 * i], high[2 * i + 1]};
        }
        __syncthreads();
#pragma unroll 1
        for (int x = warp; x * at_once < kUnits * kRound / 8; x += kWarps) {
            const int place = x * at_once + lane * at_once / 32, piece = lane % (32 / at_once), row = row0 + place / kUnits * 8 + piece / 4;
            if (row >= group) continue;
            Together together;
            together.add(shared.tile(0, slot) + (32 * place + piece) * 16, kSlots * kTileBytes,
                         reinterpret_cast<const unsigned char*>(shared.totals + row), kRows * sizeof(float2), kWarps, factor);
            emit(row * kUnits + place % kUnits, piece % 4, together);
        }
    }
}

// By copy(to, from, valid): pieces kFirst to kEnd of this lane, of a tile of which so many tokens live.
template <int kFirst, int kEnd, class Copy>
__device__ __forceinline__ void copy_pieces(SharedAddress tile, const unsigned char* rows, int tokens, Copy copy) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = kFirst; i < kEnd; i++) {
        if constexpr (32 % kPieces == 0) {
            constexpr int kAtATime = 32 / kPieces;  // rows
            const int row = lane / kPieces, piece = lane % kPieces;
            copy(flip_bits(tile + piece_at(row, piece), i * kAtATime % kSpread * 16) + i * kAtATime * kRowBytes,
                 rows + row * kRowBytes + piece * 16 + i * kAtATime * kRowBytes, i * kAtATime < tokens - row);
        } else {
            const int row = (i * 32 + lane) / kPieces, piece = (i * 32 + lane) % kPieces;
            copy(tile + piece_at(row, piece), rows + row * kRowBytes + piece * 16, row < tokens);
        }
    }
}

template <int kRows>
__device__ __forceinline__ void decode(const Decode& call) {
    DYNAMIC_SHARED(unsigned char, start);
    const Shared<kRows> shared(start);
    static_assert(kStages * (kRows + 4) * kRowBytes >= 16 * kRows * kUnits * kUnit, "the places of heads are one for what a block has of a head");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = call.group;
    const OncePolicy policy = once();
    // Keys of this warp's tile, if that of warp 0 is tile `tile` of a head.
    const auto rows_of = [&](int slot, int head, int tile) {
        const long long row = static_cast<long long>(head) * call.max_tokens + (tile + warp) * kTokens;
        return call.cache + slot * call.slot_stride + row * kRowBytes;
    };
    // The keys that are this warp's first ones if heads are about as long: on their way before lengths are known.
    const auto guess = [&](int slot, int head, int tile, bool lives) {
        copy_pieces<0, kGuessed>(shared_address(shared.tile(warp, 0)), rows_of(slot, head, tile), lives ? call.max_tokens - (tile + warp) * kTokens : 0,
                                 [&](SharedAddress to, const void* from, bool valid) { copy_async_unsure(to, from, valid, policy); });
        commit_copies();
    };
    // Where a block can have four times as many tokens, its first ones come to the L2 while the launch before ends.
    const bool many = static_cast<long long>(call.max_tokens) * call.several >= 4 * kLeast * kTokens * max(call.parts, 1);
    const auto prefetch = [&](int slot, int head, int tile, bool lives) {
        const int line = lane * 16 * kGuessed;
        if (!many || !lives || line >= min(call.max_tokens - (tile + warp) * kTokens, kTokens) * kRowBytes) return;
        const unsigned char* place = rows_of(slot, head, tile) + line;
#pragma unroll
        for (int further = 0; further < 16 * kGuessed; further += 128) {
            prefetch_line(place + further);
            prefetch_line(place + further + call.kv_stride);
        }
    };
    const Part part(call, prefetch, guess);
    if (part.begin >= part.end) {
        wait_for_copies<0>();
        return;
    }

    Walk ahead(part), walk(part);
    const bool guessed = call.window == 0 && part.even;
    bool is_there = guessed;
    int free = !guessed;  // the slot that is filled next; what was fetched in vain is left where it is
    // K or V, `further` bytes on, of this warp's tile, if it has one.
    const auto fill = [&](long long further) {
        const Place& place = ahead.at;
        if (ahead.count(part) > warp && place.position >= 0) {
            const int tokens = place.position - place.token(warp);
            const unsigned char* rows = rows_of(place.slot, place.head, place.first_tile + place.tile) + further;
            const SharedAddress tile = shared_address(shared.tile(warp, free));
            const auto copy = [&](SharedAddress to, const void* from, bool valid) { copy_async_once(to, from, valid, policy); };
            if (!is_there) copy_pieces<0, kGuessed>(tile, rows, tokens, copy);
            copy_pieces<kGuessed, kTokens * kPieces / 32>(tile, rows, tokens, copy);
        }
        is_there = false;
        commit_copies();
        free = free + 1 == kSlots ? 0 : free + 1;
    };
    // Of the tiles that come next, if any do: first what belongs to a head.
    const auto fill_keys = [&] {
        const Place& place = ahead.at;
        if (ahead.count(part) > 0 && place.position >= 0 && ahead.begins(part)) {
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
        commit_copies();
        fill(0);
    };
    const auto fill_values = [&] {
        fill(call.kv_stride);
        if (ahead.done < part.end) ahead.advance(call, part, ahead.count(part));
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; stage++) {
        fill_keys();
        fill_values();
    }
    const Score score = call.score;
    // The head that this block begins with, if it is put together here.
    const int from_first = part.begin - part.first.tile, number = static_cast<int>(blockIdx.x);
    const bool ends_it = part.first.tile > 0 && from_first + part.first.tiles <= part.end;
    const int first_block = part.even ? part.base : ends_it ? quotient(from_first, part.share) : number;
    const int with = part.even ? min((part.first.tiles - 1) / kLeast, call.parts - 1) + 1 : number - first_block + 1;
    const Sharing sharing(group * kUnits, first_block, with, part.even, call.partials, part.even ? reinterpret_cast<float4*>(shared.heads) : call.kept);
    const auto store = [&](const Place& place, int unit, int piece, const Together& all) {
        const float one_of = reciprocal(all.sum);
        unsigned char* out = call.out + static_cast<long long>(place.slot * call.kv_heads + place.head) * group * kRowBytes;
        unsigned* words = reinterpret_cast<unsigned*>(out) + 8 * unit + piece;
        words[0] = pack(Element{}, {all.value.x * one_of, all.value.y * one_of});
        words[4] = pack(Element{}, {all.value.z * one_of, all.value.w * one_of});
    };

    unsigned queries[kHeadDim / 16][kRows / 4];
    Running<kRows> running;
    int slot = !guessed;  // of the keys
    for (int count; walk.done < part.end; walk.advance(call, part, count)) {
        const Place& at = walk.at;
        count = walk.count(part);
        const int from = walk.done - at.tile, to = from + at.tiles;  // the whole head
        if (walk.begins(part)) {
            wait_for_copies<3 * kStages - 4>();
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
            if (warp == kWarps - 1 && to <= part.end && at.position >= 0) running.begin(head, shared.fresh, score);
        }
        wait_for_copies<3 * kStages - 5>();
        __syncwarp();
        fill_keys();
        const int token = at.token(warp);
        const bool takes_part = warp < count && at.position >= 0;
        float sums[kChains][kTokens / 8][4] = {};
        auto& scores = sums[0];
        if (takes_part) {
            unsigned char* tile = shared.tile(warp, slot);
            const LanePieces keys(shared_address(tile), lane % 8 + lane / 16 * 8, lane / 8 % 2);
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
                            if (key >= at.position || key < at.first_key) scores[j][e] = kMasked;
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
        }
        slot = slot + 1 == kSlots ? 0 : slot + 1;
        wait_for_copies<3 * kStages - 4>();
        __syncwarp();
        fill_values();
        if (takes_part) {
            unsigned char* tile = shared.tile(warp, slot);
            const LanePieces values(shared_address(tile), lane % 16, lane / 16);
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
        const int used = slot;
        slot = slot + 1 == kSlots ? 0 : slot + 1;
        if (at.tile + count < at.tiles && walk.done + count < part.end) continue;
        // The end of this head, or of what this block has of it.
        if (at.position < 0) {
            unsigned char* out = call.out + static_cast<long long>(at.slot * call.kv_heads + at.head) * group * kRowBytes;
#pragma unroll 1
            for (int x = threadIdx.x; x < group * kPieces; x += kBlock) reinterpret_cast<uint4*>(out)[x] = uint4{};
            continue;
        }
        const bool begins = part.begin <= from;
        put_together(shared, used, running, group, score.factor, [&](int unit, int piece, const Together& all) {
            if (begins && to <= part.end) {
                store(at, unit, piece, all);
                return;
            }
            sharing.give(unit, piece, all, to <= part.end);
        });
    }
    wait_for_copies<0>();
    sharing.take(reinterpret_cast<float4*>(shared.ring), kWarps * kSlots * kTileBytes, score.factor,
                 [&](int unit, int piece, const Together& all) { store(part.first, unit, piece, all); });
}

#ifndef NO_DECODE_KERNELS
// In the order of their first use: they come to a multiprocessor in lines of 64 bytes.
#define PARAMETERS                                                                                                                        \
    const int *lengths, const int *new_lengths, long long max_tokens, long long window, long long slots, long long kv_heads,              \
        long long parts, long long several, long long group,                                                                              \
        unsigned char *cache, long long slot_stride, long long kv_stride,                                                                 \
        const unsigned char *q, long long q_stride, const unsigned char *k, long long k_stride, const unsigned char *v, long long v_stride, \
        const float *cos_sin, long long rotary_dim, double factor, double inner, unsigned char *out, float4 *partials, float4 *kept
#define CALL                                                                                                                             \
    {lengths, new_lengths, static_cast<int>(max_tokens), static_cast<int>(min(window, 0x7FFFFFFFLL)), static_cast<int>(slots),           \
     static_cast<int>(kv_heads), static_cast<int>(parts), static_cast<int>(several),                                                     \
     static_cast<int>(group), cache, slot_stride, kv_stride, q, q_stride, k, k_stride, v, v_stride, cos_sin,                             \
     static_cast<int>(rotary_dim), {factor, inner}, out, partials, kept}

// Up to 8 query heads for a K/V head, and up to 16.
extern "C" __global__ void __launch_bounds__(kBlock, BLOCKS) attention_decode_8(PARAMETERS) { decode<8>(CALL); }
extern "C" __global__ void __launch_bounds__(kBlock, BLOCKS) attention_decode_16(PARAMETERS) { decode<16>(CALL); }
#endif
