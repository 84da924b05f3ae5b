// Trees of draft tokens, grown by a level after each enqueue of a draft model. Launched by
// trt_kvcache/kernels/draft_tree_kernels.py; trt_kvcache/kernels/growing_trees.py defines which tokens a tree keeps.

#include "sampling/block_scan.cuh"
#include "sampling/rows.cuh"
#include "shared_memory.cuh"
#include "tree_tokens.cuh"
#include "vector_copy.cuh"

// The tree of a slot so far. Parents come before their children, the chosen path first.
struct GrowingTree {
    RowParams params;  // of the request, at the next token after the sequence
    double scores[kMaxTreeTokens];
    int tokens[kMaxTreeTokens], parents[kMaxTreeTokens], depths[kMaxTreeTokens];
    int parents_before[kMaxTreeTokens];  // indices in the tree before the last level
    int count, num_chosen, limit, max_depth;
};
static_assert(sizeof(GrowingTree) == 1616, "as the host allocates");

constexpr int kTreeThreads = 256;

__device__ __forceinline__ double infinity() { return __uint_as_float(0x7F800000u); }

// A token that a tree may keep: one of the tree, by its index, or a successor of one.
struct TreeCandidate {
    double key;  // the score; infinity on the chosen path
    int index;

    __device__ __forceinline__ static int successor(int of, int rank) { return (of + 1) * kMaxTreeTokens + rank; }
    __device__ __forceinline__ bool is_before(const TreeCandidate& other) const {
        return key > other.key || (key == other.key && index < other.index);
    }
    __device__ __forceinline__ TreeCandidate first(const TreeCandidate& other) const {
        return other.is_before(*this) ? other : *this;
    }
};

// For all lanes of a warp.
__device__ __forceinline__ TreeCandidate first_of_warp(TreeCandidate one) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
        one = one.first({__shfl_xor_sync(~0u, one.key, lanes), __shfl_xor_sync(~0u, one.index, lanes)});
    return one;
}

// Adds a level to the tree of each slot, and prepares the enqueue and the choices of the next level.
// found [slots * rows_of_slot, 1 + 2 * num_top], as token_logprobs writes it, and results [slots * rows_of_slot]: after
// each token of the last enqueue, of which the deepest ones count; after the sequence where level is 1.
// For each of `width` tokens of a slot, of which the tree has the first ones: ids, ancestors, depths (may be null) and
// rows. Grid: a block for each slot. All threads load; then a warp, in which each lane has two tokens of the tree and
// their successors.
extern "C" __global__ void __launch_bounds__(kTreeThreads)
    grow_trees(GrowingTree* trees, const unsigned* found, long long num_top, const RowResult* results,
               long long rows_of_slot, long long level, int* ids, Number* ancestors, int* depths, RowParams* rows,
               long long width) {
    constexpr int kTokensOfLane = kMaxTreeTokens / 32;
    SHARED_ARRAY(float, logprobs, kMaxTreeTokens* kMaxTreeTokens);
    GrowingTree& tree = trees[blockIdx.x];
    const int top = static_cast<int>(num_top), lane = static_cast<int>(threadIdx.x),
              first_depth = static_cast<int>(level), limit = tree.limit, count = tree.count;
    const bool is_first = level == 1, grows = first_depth <= tree.max_depth;
    const auto row_of = [&](int token) { return blockIdx.x * rows_of_slot + (is_first ? 0 : token); };
    const auto found_of = [&](int token) { return found + row_of(token) * (1 + 2 * top) + 1; };
    // In level 1 index 0 stands for the sequence itself.
    const auto has_successors = [&](int token) {
        if (!grows || (is_first ? token != 0 : token >= count || tree.depths[token] != first_depth - 1)) return false;
        return results[row_of(token)].error == kNoError;
    };

    for (int i = threadIdx.x; i < kMaxTreeTokens * kMaxTreeTokens; i += kTreeThreads) {
        const int token = i / kMaxTreeTokens, rank = i % kMaxTreeTokens;
        const bool exists = rank < top && has_successors(token) && static_cast<int>(found_of(token)[rank]) >= 0;
        logprobs[i] = exists ? __uint_as_float(found_of(token)[top + rank]) : __uint_as_float(0xFF800000u);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;

    // The successors of a token come by descending score, so that the next one of each is compared.
    const int num_chosen = tree.num_chosen, last_chosen = is_first ? 0 : num_chosen - 1;
    const bool may_extend = num_chosen == first_depth - 1;
    int tokens[kTokensOfLane], parents[kTokensOfLane], token_depths[kTokensOfLane], taken[kTokensOfLane] = {};
    double scores[kTokensOfLane], own[kTokensOfLane];
#pragma unroll
    for (int i = 0; i < kTokensOfLane; i++) {
        const int token = lane + 32 * i;
        const bool exists = token < count;
        tokens[i] = exists ? tree.tokens[token] : 0;
        parents[i] = exists ? tree.parents[token] : -1;
        token_depths[i] = exists ? tree.depths[token] : 0;
        scores[i] = exists ? tree.scores[token] : 0;
        own[i] = token < num_chosen ? infinity() : exists ? scores[i] : -infinity();
    }
    const auto score_of = [&](int i, int rank) {
        return (is_first ? 0 : scores[i]) + logprobs[(lane + 32 * i) * kMaxTreeTokens + rank];
    };
    const auto next_key = [&](int i) {
        const double score = score_of(i, taken[i]);
        const bool extends = may_extend && lane + 32 * i == last_chosen && !taken[i];
        return extends && score > -infinity() ? infinity() : score;
    };
    Number kept = 0;
    for (int i = 0; i < limit; i++) {
        TreeCandidate best{-infinity(), kMaxTreeTokens * (kMaxTreeTokens + 1)};
#pragma unroll
        for (int x = 0; x < kTokensOfLane; x++) {
            const int token = lane + 32 * x;
            best = best.first({own[x], token}).first({next_key(x), TreeCandidate::successor(token, taken[x])});
        }
        best = first_of_warp(best);
        if (best.key == -infinity()) break;
        const int of = best.index / kMaxTreeTokens - 1;
        if (of < 0) kept |= 1ull << best.index;
#pragma unroll
        for (int x = 0; x < kTokensOfLane; x++) {
            if (best.index == lane + 32 * x) own[x] = -infinity();
            if (of == lane + 32 * x) taken[x]++;
        }
    }

    const int owner = last_chosen % 32;
    const int taken_of_chosen = __shfl_sync(~0u, last_chosen < 32 ? taken[0] : taken[1], owner < 0 ? 0 : owner);
    const int extension = may_extend && taken_of_chosen ? 1 : 0, num_kept = __popcll(kept);
    const auto new_place = [&](int token) {
        return __popcll(kept & ((1ull << token) - 1)) + (token >= num_chosen ? extension : 0);
    };
    __syncwarp();  // all have read the tree
    int new_count = num_kept;
#pragma unroll
    for (int i = 0; i < kTokensOfLane; i++) {
        const int token = lane + 32 * i, up_to = warp_prefix_sum(taken[i]);
        const int first_place = new_count + up_to - taken[i];
        new_count += __shfl_sync(~0u, up_to, 31);
        const auto write = [&](int place, int id, int parent, int before, int depth, double score) {
            tree.tokens[place] = id;
            tree.parents[place] = parent;
            tree.parents_before[place] = before;
            tree.depths[place] = depth;
            tree.scores[place] = score;
        };
        if (kept >> token & 1) {
            const int parent = parents[i];
            write(new_place(token), tokens[i], parent < 0 ? -1 : new_place(parent), parent, token_depths[i], scores[i]);
        }
        if (!taken[i]) continue;
        // The chosen token first, with the probability of the likeliest one.
        const int chosen = results[row_of(token)].token, parent = is_first ? -1 : new_place(token);
        const bool extends = extension && token == last_chosen;
        for (int rank = 0, next = 0; rank < taken[i]; rank++) {
            int id = chosen;
            if (rank) {
                if (static_cast<int>(found_of(token)[next]) == chosen) next++;
                id = static_cast<int>(found_of(token)[next++]);
            }
            write(extends && !rank ? num_chosen : first_place + rank, id, parent, is_first ? -1 : token, first_depth,
                  score_of(i, rank));
        }
    }
    if (lane == 0) {
        tree.count = new_count;
        tree.num_chosen = num_chosen + extension;
    }
    __syncwarp();

    for (int token = lane; token < width; token += 32) {
        const long long at = blockIdx.x * width + token;
        const bool exists = token < new_count;
        Number path = 1ull << token;
        if (exists) {
            for (int parent = tree.parents[token]; parent >= 0; parent = tree.parents[parent]) path |= 1ull << parent;
        }
        ids[at] = exists ? tree.tokens[token] : 0;
        ancestors[at] = path;
        if (depths) depths[at] = __popcll(path) - 1;
        RowParams row = tree.params;
        row.counter += first_depth;
        const bool is_deepest = exists && tree.depths[token] == first_depth && first_depth < tree.max_depth;
        row.flags = is_deepest ? row.flags | kLogprobs : 0;
        rows[at] = row;
    }
}

// Gathers the row that each token of the next enqueue reads: of its parent in the last one, or of the sequence.
// sequences [slots], last [slots * width], out [slots * width], rows of row_nbytes. Grid: x along a row, y over tokens, z over slots.
extern "C" __global__ void __launch_bounds__(kThreads)
    gather_parents(const unsigned char* sequences, const unsigned char* last, const GrowingTree* trees,
                   unsigned char* out, long long row_nbytes, long long width) {
    const long long slot = blockIdx.z, token = blockIdx.y;
    if (token >= trees[slot].count) return;
    const int parent = trees[slot].parents_before[token];
    const unsigned char* const from =
        parent < 0 ? sequences + slot * row_nbytes : last + (slot * width + parent) * row_nbytes;
    unsigned char* const to = out + (slot * width + token) * row_nbytes;
    with_widest_vector(address_of(sequences) | address_of(last) | address_of(out) | row_nbytes,
                       [&](auto vector) { copy_bytes<decltype(vector)>(to, from, row_nbytes); });
}
