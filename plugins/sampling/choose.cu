// Chooses a token for each row of logits. Launched by trt_kvcache/kernels/sampling_kernels.py; README.md describes it.
// Grid: x the blocks of a row, y the rows; each group of blocks takes one row after another.

#include "dependent_launch.cuh"
#include "sampling/histogram.cuh"
#include "sampling/philox.cuh"
#include "sampling/row_barrier.cuh"
#include "sampling/row_exchange.cuh"
#include "sampling/rows.cuh"

// The last token, in the order of classes, then of logits, then of ids, that top_k keeps.
struct LastKept {
    unsigned token_class;
    Number key;  // key_of() of the last one of this class

    __device__ __forceinline__ bool keeps(unsigned of_class, float logit, int id) const {
        return of_class < token_class || (of_class == token_class && key_of(logit, id) <= key);
    }
};

// Tokens up to a border: all tokens of the classes before token_class, and `members` tokens of token_class.
struct Border {
    unsigned token_class;
    Number members;  // of the border's class
    Number weight;   // of all tokens up to the border
};

// Shares of tokens, and their sums: weights or numbers of tokens.
template <bool kByWeight>
struct ShareType {
    using Type = Weight;
};
template <>
struct ShareType<false> {
    using Type = unsigned;
};

// End of top_k.
struct Cut {
    FoundBin bin;  // a coarse one, with numbers of tokens; -1: behind all tokens that have a weight
    Number members, weight_before;
    Number weight_about;  // of all tokens that top_k keeps: those of a bin weigh nearly the same
};

template <bool kIsKept>
struct RowSampler {
    const RowParams& params;
    RowWorkspace& row;
    RowBarrier& barrier;
    RowExchange& exchange;
    const RowChunk<kIsKept>& chunk;
    Number fine_bins = ~0ull;  // the coarse bin that each of row.fine_count holds, kCoarseBits each
    int num_fine = 0;
    LastKept last{kClasses, ~0ull};
    Border chosen{kClasses, 0, 0};  // the class of the token; kClasses: of any

    // The token that random bits choose; -1 in all threads but the one, of all blocks, that finds it.
    __device__ __forceinline__ int choose(const unsigned long long& random) {
        if (params.top_k || params.top_p) {
            add_weights(chunk, exchange.rank, row, params.top_k);
            if (params.top_p && params.min_weight) add_likely_weight();
            barrier.wait();
            choose_class(random);
        }
        if (params.top_p) return find_token<false>([&](unsigned) { return static_cast<unsigned>(chosen.members) - 1; });
        return find_token<true>([&](Number of_row) { return __umul64hi(random << 11, of_row); });
    }

    // Target of top_p: the last token that it keeps is the first whose prefix sum exceeds this. all: weight of the tokens
    // that top_k keeps.
    __device__ __forceinline__ Number end_of_top_p(Number all) const {
        const unsigned long long shifted = params.top_p << 11;
        return __umul64hi(shifted, all) + (shifted * all != 0) - 1;
    }
    // Target of the random number: the chosen token is the first whose prefix sum exceeds this. of_top_p: weight of the
    // tokens that top_p keeps.
    __device__ __forceinline__ Number place_of_random(const unsigned long long& random, Number of_top_p) const {
        return __umul64hi(random << 11, params.min_weight ? min(of_top_p, row.likely_weight) : of_top_p);
    }

    // Returns the coarse bin in which top_p ends. The bin of the random number depends on the exact end of top_p, but
    // nearly always both ends of this bin lead to the same bin: `most` and `least` are those of its two ends.
    __device__ __forceinline__ FoundBin find_end(const BinSums<Weight>& weights, Number target,
                                                 const unsigned long long& random, int& most, int& least) {
        const FoundBin end = weights.find(target, 0);
        const bool is_large = end.value > end.before / 8;  // else one end suffices
        weights.look_for(place_of_random(random, end.before + end.value), 1);
        if (is_large) weights.look_for(place_of_random(random, end.before), 2);
        __syncthreads();
        most = found_bins()[1].bin;
        least = is_large ? found_bins()[2].bin : -1;
        return end;
    }

    // Finds the tokens that top_k keeps. With top_p also the class in which the random number falls, the most likely
    // first, and the number of its tokens up to there.
    __device__ __forceinline__ void choose_class(const unsigned long long& random) {
        BinSums<Weight> weights{};
        Cut cut{{-1, 0, 0}, 0, 0, 0};
        FoundBin coarse{-1, 0, 0};
        int most = -1, least = -1;
        if (params.top_p) weights = BinSums<Weight>(weights_of_thread(row.coarse_weight));
        Number all = weights.total;
        if (params.top_k) cut = find_cut(weights);
        const bool is_cut = cut.bin.bin >= 0;
        if (params.top_p)
            coarse = find_end(weights, end_of_top_p(is_cut ? cut.weight_about : all), random, most, least);
        count_fine(coarse.bin, most, is_cut ? cut.bin.bin : least);
        if (is_cut) all = keep_top_k(cut);
        if (!params.top_p) return;
        const int end = coarse.bin;
        // the second border is nearly always in one of these
        const uint4 of_end = counts_in(end), of_most = counts_in(most);
        Number target = end_of_top_p(all);
        if (is_cut) coarse = weights.find(target, 0);
#pragma unroll 1
        for (bool is_end = true;; is_end = false) {
            uint4 counts = coarse.bin == end ? of_end : of_most;
            if (coarse.bin != end && coarse.bin != most) {
                count_fine(coarse.bin);
                counts = counts_in(coarse.bin);
            }
            chosen = border_in(coarse, target, counts);
            if (!is_end) return;
            target = place_of_random(random, chosen.weight);
            coarse = weights.find(target, 3);
        }
    }

    __device__ __forceinline__ void add_likely_weight() {
        Number sum = 0;
        const auto load = [&](int token, bool exists) -> Weight {
            return weight_of(chunk.class_at(chunk.logit_at(token, exists)));
        };
        for_each_token<1>(chunk.begin, chunk.end, load,
                          [&](Weight weight) { sum += weight >= params.min_weight ? weight : 0; });
        sum = sums_of_warps(sum).total;
        if (threadIdx.x == 0) atomicAdd(&row.likely_weight, sum);
    }

    // Index of the counts of the classes of a coarse bin; -1: not counted.
    __device__ __forceinline__ int slot_of(int coarse_bin) const {
        int slot = -1;
#pragma unroll
        for (int i = 0; i < kFineSlots; i++) {
            if (static_cast<int>(fine_bins >> kCoarseBits * i & kNoCoarseBin) == coarse_bin) slot = i;
        }
        return slot;
    }

    // Bins to count in a coarse bin: none if that was done before, or if there is no such bin.
    __device__ __forceinline__ FineBins add_fine_bin(int coarse_bin, int counted) {
        if (coarse_bin < 0 || slot_of(coarse_bin) >= 0) return {-1, 0};
        fine_bins ^= static_cast<Number>(coarse_bin ^ kNoCoarseBin) << kCoarseBits * num_fine;
        return {coarse_bin, (num_fine++ - counted) * kFineBins};
    }

    // Counts of a thread in a coarse bin; 0 where it has none.
    __device__ __forceinline__ uint4 counts_in(int coarse_bin) const {
        return coarse_bin < 0 ? uint4{0, 0, 0, 0} : counts_of_thread(row.fine_count[slot_of(coarse_bin)], kFineBins);
    }

    // Counts the classes of up to three coarse bins.
    __device__ __forceinline__ void count_fine(int a, int b = -1, int c = -1) {
        const int counted = num_fine;
        const FineBins of_a = add_fine_bin(a, counted), of_b = add_fine_bin(b, counted),
                       of_c = add_fine_bin(c, counted);
        if (num_fine == counted) return;
        add_fine_counts(chunk, exchange.rank, (num_fine - counted) * kFineBins, row.fine_count[counted], of_a, of_b,
                        of_c);
        barrier.wait();
    }

    // The border at which the weight of all tokens, the most likely first, exceeds the target, which is in a coarse
    // bin.
    __device__ __forceinline__ Border border_in(const FoundBin& coarse, Number target, const uint4& counts) {
        const unsigned first_class = static_cast<unsigned>(coarse.bin) << kFineBits;
        const int shift = unit_shift(first_class);
        const Number in_units = (target - coarse.before) >> shift;
        const FoundBin fine =
            BinSums<Number>(units_of_thread(counts, first_class + first_bin_of_thread())).find(in_units, 4);
        const unsigned token_class = first_class + fine.bin, units = units_of(token_class);
        const Number members = quotient(in_units - fine.before, units) + 1;
        return {token_class, members, coarse.before + ((fine.before + members * units) << shift)};
    }

    // The coarse bin in which top_k ends.
    __device__ __forceinline__ Cut find_cut(const BinSums<Weight>& weights) {
        const unsigned wanted = static_cast<unsigned>(min(params.top_k, static_cast<long long>(kMaxTokens) + 1));
        const BinSums<unsigned> tokens(as_bins(counts_of_thread(row.coarse_count, kCoarseBins)));
        if (wanted > tokens.total) return {{-1, 0, 0}, 0, 0, 0};
        const FoundBin bin = tokens.find(wanted - 1, 5);
        const Number members = wanted - bin.before;
        if (!params.top_p) return {bin, members, 0, 0};
        const FoundBin weight = weights.at(bin.bin, 7);
        const float share = __fdiv_rn(static_cast<float>(members), static_cast<float>(bin.value));
        const Number of_members = static_cast<Number>(__fmul_rn(static_cast<float>(weight.value), share));
        return {bin, members, weight.before, weight.before + max(min(of_members, weight.value), Number{1})};
    }

    // Finds the last token that top_k keeps; what all of them weigh.
    __device__ __forceinline__ Number keep_top_k(const Cut& cut) {
        const uint4 counts = counts_in(cut.bin.bin);
        const FoundBin fine = BinSums<unsigned>(as_bins(counts)).find(static_cast<unsigned>(cut.members - 1), 6);
        const unsigned first_class = static_cast<unsigned>(cut.bin.bin) << kFineBits,
                       token_class = first_class + fine.bin;
        const Number members = cut.members - fine.before;
        Number weight = 0;
        if (params.top_p) {
            const ThreadBins units = units_of_thread(counts, first_class + first_bin_of_thread());
#pragma unroll
            for (int i = 0; i < kBinsOfThread; i++)
                weight += first_bin_of_thread() + i < fine.bin ? units.values[i] : 0;
            weight = cut.weight_before
                     + ((sums_of_warps(weight).total + members * units_of(token_class)) << unit_shift(token_class));
        }
        last = {token_class, ~0ull};
        if (members < fine.value) last.key = break_ties(token_class, members);
        return weight;
    }

    // Orders the tokens of a class by logit, the largest first, and equal logits by id, the lowest first. Returns the key
    // of the last of the first `members` tokens.
    __device__ __forceinline__ Number break_ties(unsigned of_class, Number members) {
        Number prefix = 0;  // high digits of the key
#pragma unroll 1
        for (int digit = 0;; digit++) {
            const int shift = shift_of_digit(digit), bits = bits_of_digit(digit);
            unsigned* const counts = row.key_count[digit];
            add_counts(chunk, exchange.rank, 1 << bits, counts, [&](int token, float logit) {
                const Number key = key_of(logit, token) >> shift;
                return chunk.class_at(logit) == of_class && key >> bits == prefix
                           ? static_cast<int>(key & ((1u << bits) - 1))
                           : -1;
            });
            barrier.wait();
            const FoundBin bin = BinSums<unsigned>(as_bins(counts_of_thread(counts, kFineBins)))
                                     .find(static_cast<unsigned>(members - 1), 5);
            members -= bin.before;
            prefix = prefix << bits | static_cast<unsigned>(bin.bin);
            // at the last digit at the latest, as keys differ
            if (members == bin.value) return ((prefix + 1) << shift) - 1;
        }
    }

    // Value of a token in the search for the chosen one. Without top_p: its weight, as tokens are in the order of their
    // ids. With top_p: 1 if it is of the chosen class, else 0.
    template <bool kByWeight>
    using Share = typename ShareType<kByWeight>::Type;
    template <bool kByWeight>
    __device__ __forceinline__ Share<kByWeight> share_of(int token, float logit) const {
        const unsigned token_class = chunk.class_at(logit);
        if (!kByWeight) return token_class == chosen.token_class && last.keeps(token_class, logit, token);
        const Weight weight = weight_of(token_class);
        const Share<kByWeight> share = weight >= params.min_weight ? static_cast<Share<kByWeight>>(weight) : 0;
        return last.keeps(token_class, logit, token) ? share : 0;  // asked of all: a branch takes longer
    }

    // The first token, by its id, with which the sum of the shares exceeds target_of(sum of all); -1 in all other
    // threads.
    template <bool kByWeight, class TargetOf>
    __device__ __forceinline__ int find_token(TargetOf target_of) {
        Share<kByWeight> own = 0;
        const auto load = [&](int token, bool exists) {
            return share_of<kByWeight>(token, chunk.logit_at(token, exists));
        };
        for_each_token(chunk.begin, chunk.end, load, [&](Share<kByWeight> share) { own += share; });
        const auto of_warps = sums_of_warps(own), of_blocks = exchange.sums(of_warps.total);
        // may be negative, and so very large
        const Share<kByWeight> target = target_of(of_blocks.total) - of_blocks.before - of_warps.before;
        return target < sum_of_warp(own) ? find_in_run<kByWeight>(target) : -1;
    }

    // The same within the run of a warp, in which it is. For all of its lanes.
    template <bool kByWeight>
    __device__ __forceinline__ int find_in_run(Share<kByWeight> target) const {
        const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
        constexpr int kAtOnce = 3;
        int token = chunk.begin + warp * run_of_warp(chunk.end - chunk.begin) + lane;
        Share<kByWeight> shares[kAtOnce];
#pragma unroll 1
        for (;; token += 32 * kAtOnce) {
            Share<kByWeight> sum = 0;
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                shares[i] =
                    share_of<kByWeight>(token + 32 * i, chunk.logit_at(token + 32 * i, token + 32 * i < chunk.end));
                sum += shares[i];
            }
            const Share<kByWeight> of_all = sum_of_warp(sum);
            if (target < of_all) break;
            target -= of_all;
        }
        int i = 0;
        for (Share<kByWeight> of_all; target >= (of_all = sum_of_warp(shares[0])); target -= of_all) {
#pragma unroll
            for (int next = 1; next < kAtOnce; next++) shares[next - 1] = shares[next];
            i++;
        }
        const Share<kByWeight> up_to = warp_prefix_sum(shares[0]);
        return up_to - shares[0] <= target && target < up_to ? token + 32 * i : -1;
    }

    // Once all blocks have taken what they need.
    __device__ __forceinline__ void reset_workspace() const {
        const int first = exchange.rank * kRowThreads + threadIdx.x, step = exchange.blocks * kRowThreads;
        if (!params.top_k && !params.top_p) return;
        unsigned *const fine = row.fine_count[0], *const digits = row.key_count[0];
#pragma unroll 1
        for (int bin = first; bin < kCoarseBins; bin += step) {
            row.coarse_weight[bin] = 0;
            row.coarse_count[bin] = 0;
        }
#pragma unroll 1
        for (int bin = first; bin < num_fine * kFineBins; bin += step) fine[bin] = 0;
        if (params.top_k) {
#pragma unroll 1
            for (int bin = first; bin < kKeyDigits * kFineBins; bin += step) digits[bin] = 0;
        }
        if (first == 0) row.likely_weight = 0;
    }
};

constexpr int kEditsAtOnce = 5;  // from memory, so more than later on

struct LogitWithEdits {
    float logit, bias;
    unsigned uses;
};

// The largest logit of a block after bias and penalties, as ranked(). uses [vocab] and bias [vocab] of the row, or
// null; the logits go to `edited` [vocab] if that is not null.
template <class Chunk>
__device__ __forceinline__ Number edit_and_find_largest(const Chunk& chunk, const RowParams& params,
                                                        const unsigned* uses, const float* bias, float* edited) {
    unsigned best = 0;
    int place = 0;
    const auto load = [&](int token, bool exists) -> LogitWithEdits {
        return {chunk.logit_at(token, exists), exists && bias ? bias[token] : 0, exists && uses ? uses[token] : 0};
    };
    const auto edit = [&](LogitWithEdits(&tokens)[kEditsAtOnce]) {
        bool any = false;
#pragma unroll
        for (const LogitWithEdits& one : tokens) any |= one.uses || one.bias != 0;
        if (!any) return;
#pragma unroll
        for (LogitWithEdits& one : tokens) {
            if (one.uses || one.bias != 0)
                one.logit =
                    edited_logit(one.logit, one.bias, one.uses, params.repetition, params.frequency, params.presence);
        }
    };
    for_each_token<kEditsAtOnce>(chunk.begin, chunk.end, load, edit,
                                 [&](int token, const LogitWithEdits& one, bool exists) {
                                     const unsigned order = order_of(one.logit);
                                     if (order > best) best = order, place = token;
                                     if (edited && exists) edited[token] = one.logit;
                                 });
    return block_max(static_cast<Number>(best) << 32 | (~0u - static_cast<unsigned>(place)));
}

// Arguments of a launch. tokens[row]: the chosen token of a row, 0 after an error; unchanged for inactive rows. counts [rows, vocab] and bias [rows, vocab] may be null if no row needs them; then edited [groups, vocab]
// too.
struct Batch {
    const float* logits;
    long long row_stride, vocab, rows;
    RowParams* params;
    unsigned* counts;
    const float* bias;
    float* edited;
    int* tokens;
    RowResult* results;
};

// For one row, with a group of blocks.
template <bool kIsKept>
__device__ __forceinline__ void choose_token(const Batch& batch, long long row, int group, const RowParams& params,
                                             int begin, int end, RowBarrier& barrier, RowExchange& exchange) {
    SHARED_ARRAY(unsigned long long, random, 1);
    if (!(params.flags & kActive)) return;
    const bool is_edited = params.flags & (kPenalised | kBiased), is_greedy = params.flags & kGreedy;
    const RowChunk<false> as_it_came{batch.logits + row * batch.row_stride, begin, end, 0, 0};
    float* const of_group = batch.edited + group * batch.vocab;
    float* const into = is_greedy ? nullptr : kIsKept ? kept_logits() - begin : is_edited ? of_group : nullptr;
    int error = kNoError;
    Number largest, bad = 0;
    // If no logit is finite after bias and penalties, the row is searched again without them, to find out why.
#pragma unroll 1
    for (bool with_edits = is_edited;; with_edits = false) {
        const unsigned* const uses =
            with_edits && params.flags & kPenalised ? batch.counts + row * batch.vocab : nullptr;
        const float* const bias = with_edits && params.flags & kBiased ? batch.bias + row * batch.vocab : nullptr;
        const Number of_block = edit_and_find_largest(as_it_came, params, uses, bias, into);
        // By the last thread, because the first warps will wait for other blocks.
        if (!is_greedy && threadIdx.x == kRowThreads - 1) *random = random_bits(params.seed, params.counter);
        largest = exchange.largest(of_block);
        if (is_finite(logit_of_ranked(largest))) break;
        error = with_edits ? kNothingLeft : kBadLogits;
        bad = largest;
        if (!with_edits) break;
    }
    const bool is_first = exchange.rank == 0 && threadIdx.x == 0;
    if (error) {
        if (is_first) {
            batch.tokens[row] = 0;  // the next enqueue may already be on its way with it
            batch.results[row] = {-1, error, token_of_ranked(bad), logit_of_ranked(bad)};
        }
        return;
    }
    int chosen = is_first ? token_of_ranked(largest) : -1;
    if (!is_greedy) {
        const RowChunk<kIsKept> chunk{into ? into : as_it_came.logits, begin, end, logit_of_ranked(largest),
                                      params.scale};
        RowSampler<kIsKept> sampler{params, exchange.row, barrier, exchange, chunk};
        chosen = sampler.choose(*random);
        sampler.reset_workspace();
    }
    if (chosen < 0) return;
    batch.tokens[row] = chosen;
    batch.results[row] = {chosen, kNoError, 0, 0};
    batch.params[row].counter = params.counter + 1;
    if (params.flags & kPenalised) batch.counts[row * batch.vocab + chosen]++;
}

template <bool kIsKept>
__device__ __forceinline__ void choose_all_tokens(const Batch& batch, RowWorkspace* workspaces, int tokens_of_block) {
    SHARED_ARRAY(RowParams, params, 1);
    SHARED_ARRAY(uint2, first, 1);
    const int blocks = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x),
              group = static_cast<int>(blockIdx.y);
    const int begin = min(static_cast<int>(batch.vocab), rank * tokens_of_block),
              end = min(static_cast<int>(batch.vocab), begin + tokens_of_block);
    RowWorkspace& workspace = workspaces[group];
    clear_bins();
    grid_dependency_wait();
    grid_dependents_may_launch();
    if (threadIdx.x == 0) {
        *first = {workspace.at_barriers, workspace.exchanges};
        *params = batch.params[group];
    }
    __syncthreads();
    RowBarrier barrier{&workspace.at_barriers, static_cast<unsigned>(blocks), first->x};
    RowExchange exchange{workspace, rank, blocks, first->y};
#pragma unroll 1
    for (long long row = group;;) {
        choose_token<kIsKept>(batch, row, group, *params, begin, end, barrier, exchange);
        row += gridDim.y;
        if (row >= batch.rows) break;
        __syncthreads();  // one warp reads the logits of the last row longest
        if (threadIdx.x == 0) *params = batch.params[row];
        __syncthreads();
    }
    exchange.finish();
}

// A block keeps its logits in dynamic shared memory.
extern "C" __global__ void __launch_bounds__(kRowThreads, 2)
    choose_tokens(const float* logits, long long row_stride, long long vocab, long long rows, RowParams* params,
                  unsigned* counts, const float* bias, float* edited, int* tokens, RowResult* results,
                  RowWorkspace* workspaces, long long tokens_of_block) {
    const Batch batch{logits, row_stride, vocab, rows, params, counts, bias, edited, tokens, results};
    choose_all_tokens<true>(batch, workspaces, static_cast<int>(tokens_of_block));
}

// Shared memory has no room for the logits: they are read again in each pass.
extern "C" __global__ void __launch_bounds__(kRowThreads, 2)
    choose_tokens_read_again(const float* logits, long long row_stride, long long vocab, long long rows,
                             RowParams* params, unsigned* counts, const float* bias, float* edited, int* tokens,
                             RowResult* results, RowWorkspace* workspaces, long long tokens_of_block) {
    const Batch batch{logits, row_stride, vocab, rows, params, counts, bias, edited, tokens, results};
    choose_all_tokens<false>(batch, workspaces, static_cast<int>(tokens_of_block));
}
