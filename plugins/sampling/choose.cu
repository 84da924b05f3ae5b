// Chooses a token for each row of logits. Launched by trt_kvcache/kernels/cuda/sampling.py; README.md describes it.
// Grid: the blocks of a row, then rows; each group of blocks takes one row after another.

#include "dependent_launch.cuh"
#include "sampling/histogram.cuh"
#include "sampling/philox.cuh"
#include "sampling/row_barrier.cuh"
#include "sampling/rows.cuh"

// The last token, in the order of classes, then of logits, then of ids, that top_k keeps.
struct LastKept {
    unsigned token_class, order;
    int token;

    __device__ __forceinline__ bool keeps(unsigned of_class, float logit, int id) const {
        if (of_class != token_class) return of_class < token_class;
        const unsigned of_logit = order_of(logit);
        return of_logit != order ? of_logit > order : id <= token;
    }
};

// Classes up to a border: all tokens of those before it, and so many of its own.
struct Border {
    unsigned token_class;
    Number members;  // of the border's class
    Number weight;   // of all tokens up to the border
};

struct RowSampler {
    const RowParams& params;
    RowWorkspace& row;
    RowBarrier& barrier;
    RowChunk chunk;
    int rank, blocks;
    float largest;
    unsigned* bins;    // shared memory
    Number* scratch;   // shared memory
    FoundBin* found;   // shared memory
    int fine_bins[3]{-1, -1, -1};  // the coarse bin that each of row.fine_count holds
    int num_fine = 0;

    __device__ __forceinline__ unsigned class_at(float logit) const { return class_of(largest, logit, params.scale); }

    // The token that random bits choose; -1 in all threads but the one, of all blocks, that finds it.
    __device__ __forceinline__ int choose(unsigned long long random) {
        LastKept last{kClasses, 0, 0x7FFFFFFF};
        if (!params.top_k && !params.top_p) return choose_by_id(last, random);
        add_weights(chunk, row, bins, [&](float logit) { return class_at(logit); });
        if (params.top_p && params.min_weight) add_likely_weight();
        barrier.wait();
        Border border{kClasses, 0, 0};
        if (params.top_k) border = keep_top_k(last);
        if (!params.top_p) return choose_by_id(last, random);
        if (border.token_class == kClasses) {
            Number weight = 0;
            for (int bin = threadIdx.x; bin < kCoarseBins; bin += kRowThreads) weight += row.coarse_weight[bin];
            border.weight = block_prefix_sum(weight, scratch).total;
        }
        const unsigned long long shifted = params.top_p << 11;
        const Number wanted = __umul64hi(shifted, border.weight) + (shifted * border.weight != 0);
        border = find_border(wanted - 1);
        Number kept = border.weight;
        if (params.min_weight) kept = min(kept, row.likely_weight);
        const Border chosen = find_border(__umul64hi(random << 11, kept));
        const unsigned chosen_class = chosen.token_class;
        return find_token([&](int token, float logit) -> Number {
            const unsigned token_class = class_at(logit);
            return token_class == chosen_class && last.keeps(token_class, logit, token);
        }, [&](Number) { return chosen.members - 1; });
    }

    // By the order of the ids.
    __device__ __forceinline__ int choose_by_id(const LastKept& last, unsigned long long random) {
        return find_token([&](int token, float logit) -> Number {
            const unsigned token_class = class_at(logit);
            const Weight weight = weight_of(token_class);
            return weight >= params.min_weight && last.keeps(token_class, logit, token) ? weight : 0;
        }, [&](Number total) { return __umul64hi(random << 11, total); });
    }

    __device__ __forceinline__ void add_likely_weight() {
        Number sum = 0;
        chunk.for_each([&](int, float logit) {
            const Weight weight = weight_of(class_at(logit));
            if (weight >= params.min_weight) sum += weight;
        });
        sum = block_prefix_sum(sum, scratch).total;
        if (threadIdx.x == 0) atomicAdd(&row.likely_weight, sum);
    }

    // Counts the classes of a coarse bin, unless that was done before. Returns the counts.
    __device__ __forceinline__ const unsigned* fine_counts(int coarse_bin) {
        for (int i = 0; i < num_fine; i++) {
            if (fine_bins[i] == coarse_bin) return row.fine_count[i];
        }
        unsigned* const counts = row.fine_count[num_fine];
        fine_bins[num_fine++] = coarse_bin;
        add_counts(chunk, kFineBins, counts, bins, [&](int, float logit) {
            const unsigned token_class = class_at(logit);
            return token_class < kClasses && static_cast<int>(token_class >> kFineBits) == coarse_bin ? static_cast<int>(token_class % kFineBins) : -1;
        });
        barrier.wait();
        return counts;
    }

    // The border at which the weight of all tokens, the most likely first, exceeds the target.
    __device__ __forceinline__ Border find_border(Number target) {
        const FoundBin coarse = find_bin(kCoarseBins, target, found, scratch, [&](int bin) { return row.coarse_weight[bin]; });
        const unsigned* const counts = fine_counts(coarse.bin);
        const unsigned first_class = static_cast<unsigned>(coarse.bin) << kFineBits;
        const FoundBin fine = find_bin(kFineBins, target - coarse.before, found, scratch,
                                       [&](int bin) { return counts[bin] ? counts[bin] * weight_of(first_class + bin) : 0; });
        const unsigned token_class = first_class + fine.bin;
        const Weight weight = weight_of(token_class);
        const Number before = coarse.before + fine.before, members = (target - before) / weight + 1;
        return {token_class, members, before + members * weight};
    }

    // Finds the last token that top_k keeps. The border's class is kClasses if all tokens that have a weight are kept.
    __device__ __forceinline__ Border keep_top_k(LastKept& last) {
        const Number wanted = static_cast<Number>(params.top_k);
        const FoundBin coarse = find_bin(kCoarseBins, wanted - 1, found, scratch, [&](int bin) { return static_cast<Number>(row.coarse_count[bin]); });
        if (coarse.bin < 0) return {kClasses, 0, 0};
        const unsigned* const counts = fine_counts(coarse.bin);
        const FoundBin fine =
            find_bin(kFineBins, wanted - 1 - coarse.before, found, scratch, [&](int bin) { return static_cast<Number>(counts[bin]); });
        const unsigned first_class = static_cast<unsigned>(coarse.bin) << kFineBits, token_class = first_class + fine.bin;
        const Number members = wanted - coarse.before - fine.before;
        Number weight = 0;
        for (int bin = threadIdx.x; bin < kCoarseBins; bin += kRowThreads) weight += bin < coarse.bin ? row.coarse_weight[bin] : 0;
        for (int bin = threadIdx.x; bin < fine.bin; bin += kRowThreads) weight += counts[bin] ? counts[bin] * weight_of(first_class + bin) : 0;
        weight = block_prefix_sum(weight, scratch).total + members * weight_of(token_class);
        last = {token_class, 0, 0x7FFFFFFF};
        if (members < counts[fine.bin]) last = break_ties(token_class, members);
        return {token_class, members, weight};
    }

    // The last one of so many tokens of a class: those of the largest logits; of equal logits, those of the lowest ids.
    __device__ __forceinline__ LastKept break_ties(unsigned of_class, Number members) {
        unsigned prefix = 0;  // high digits of the complement of the order: the largest logits have the smallest ones
        for (int digit = 0, shift = 21; digit < 3; digit++, shift = max(shift - kFineBits, 0)) {
            const int bits = digit < 2 ? kFineBits : 10;
            unsigned* const counts = row.order_count[digit];
            add_counts(chunk, 1 << bits, counts, bins, [&](int, float logit) {
                const unsigned order = ~order_of(logit);
                const bool is_member = class_at(logit) == of_class && (digit == 0 || order >> (shift + bits) == prefix);
                return is_member ? static_cast<int>(order >> shift & ((1u << bits) - 1)) : -1;
            });
            barrier.wait();
            const FoundBin bin = find_bin(1 << bits, members - 1, found, scratch, [&](int bin) { return static_cast<Number>(counts[bin]); });
            members -= bin.before;
            prefix = prefix << bits | static_cast<unsigned>(bin.bin);
        }
        const unsigned order = ~prefix;
        const int token = find_in_slots(row.ties, [&](int, float logit) -> Number { return class_at(logit) == of_class && order_of(logit) == order; },
                                        [&](Number) { return members - 1; });
        if (token >= 0) row.last_tie = token;
        barrier.wait();
        return {of_class, order, row.last_tie};
    }

    template <class ValueOf, class TargetOf>
    __device__ __forceinline__ int find_token(ValueOf value_of, TargetOf target_of) {
        return find_in_slots(row.sums, value_of, target_of);
    }

    // The first token, by its id, with which the sum of value_of(token, logit) exceeds target_of(sum of all); -1 in all other threads.
    template <class ValueOf, class TargetOf>
    __device__ __forceinline__ int find_in_slots(Number* slots, ValueOf value_of, TargetOf target_of) {
        Number own = 0;
        chunk.for_each([&](int token, float logit) { own += value_of(token, logit); });
        own = block_prefix_sum(own, scratch).total;
        if (threadIdx.x == 0) slots[rank] = own;
        barrier.wait();
        const int thread = threadIdx.x;
        const Number all = thread < blocks ? slots[thread] : 0, lower = thread < rank ? all : 0;
        const Number target = target_of(block_prefix_sum(all, scratch).total);
        Number before = block_prefix_sum(lower, scratch).total;
        if (target < before || target - before >= own) return -1;
        int chosen = -1;
        for (int first = chunk.begin; before <= target; first += kRowThreads) {
            const int token = first + threadIdx.x;
            const Number value = token < chunk.end ? value_of(token, chunk.logits[token]) : 0;
            const PrefixSum sum = block_prefix_sum(value, scratch);
            if (before + sum.before <= target && target < before + sum.before + value) chosen = token;
            before += sum.total;
        }
        return chosen;
    }

    // Once all blocks have taken what they need.
    __device__ __forceinline__ void reset_workspace() const {
        const int first = rank * kRowThreads + threadIdx.x, step = blocks * kRowThreads;
        if (!params.top_k && !params.top_p) return;
        for (int bin = first; bin < kCoarseBins; bin += step) {
            row.coarse_weight[bin] = 0;
            row.coarse_count[bin] = 0;
        }
        for (int bin = first; bin < num_fine * kFineBins; bin += step) row.fine_count[bin / kFineBins][bin % kFineBins] = 0;
        if (params.top_k) {
            for (int bin = first; bin < 3 * kFineBins; bin += step) row.order_count[bin / kFineBins][bin % kFineBins] = 0;
        }
        if (first == 0) row.likely_weight = 0;
    }
};

// tokens[row] = the token that a row chooses; 0 if it cannot. Rows that are not active keep theirs.
// counts [rows, vocab] and bias [rows, vocab] may be null where no row asks for them; edited [groups, vocab] with them.
extern "C" __global__ void __launch_bounds__(kRowThreads, 2)
    choose_tokens(const float* logits, long long row_stride, long long vocab, long long rows, RowParams* all_params, unsigned* counts,
                  const float* bias, float* edited, int* tokens, RowResult* results, RowWorkspace* workspaces, long long blocks_of_row) {
    SHARED_ARRAY(unsigned, bins, kSharedBins);
    SHARED_ARRAY(Number, scratch, kWarpsOfBlock);
    SHARED_ARRAY(FoundBin, found, 1);
    const int blocks = static_cast<int>(blocks_of_row), group = static_cast<int>(blockIdx.x) / blocks, rank = static_cast<int>(blockIdx.x) % blocks;
    const int groups = static_cast<int>(gridDim.x) / blocks, size = (static_cast<int>(vocab) + blocks - 1) / blocks;
    const int begin = min(static_cast<int>(vocab), rank * size), end = min(static_cast<int>(vocab), begin + size);
    RowWorkspace& workspace = workspaces[group];
    RowBarrier barrier(workspace.barrier, static_cast<unsigned>(blocks));
    int turn = 0;
    grid_dependency_wait();
    for (long long row = group; row < rows; row += groups) {
        const RowParams params = all_params[row];
        if (!(params.flags & kActive)) continue;
        RowChunk chunk{logits + row * row_stride, begin, end};
        const bool is_edited = params.flags & (kPenalised | kBiased);
        Number best = 0, best_edited = 0;
        if (is_edited) {
            float* const into = edited + group * vocab;
            chunk.for_each([&](int token, float logit) {
                best = max(best, ranked(logit, token));
                if (token >= end) return;
                const float added = params.flags & kBiased ? bias[row * vocab + token] : 0.0f;
                const float changed = edited_logit(logit, params, added, params.flags & kPenalised ? counts[row * vocab + token] : 0);
                best_edited = max(best_edited, ranked(changed, token));
                into[token] = changed;
            });
            chunk.logits = into;
            best_edited = block_max(best_edited, scratch);
        } else {
            chunk.for_each([&](int token, float logit) { best = max(best, ranked(logit, token)); });
        }
        best = block_max(best, scratch);
        if (threadIdx.x == 0) {
            workspace.best[turn][rank] = best;
            if (is_edited) workspace.best_edited[turn][rank] = best_edited;
        }
        barrier.wait();
        const int thread = threadIdx.x;
        best = block_max(thread < blocks ? workspace.best[turn][thread] : 0, scratch);
        best_edited = is_edited ? block_max(thread < blocks ? workspace.best_edited[turn][thread] : 0, scratch) : best;
        turn ^= 1;
        const bool is_good = is_finite(logit_of_ranked(best));
        if (!is_good || !is_finite(logit_of_ranked(best_edited))) {
            const Number bad = is_good ? best_edited : best;
            if (rank == 0 && thread == 0) {
                tokens[row] = 0;  // the next enqueue may already be on its way with it
                results[row] = {-1, is_good ? kNothingLeft : kBadLogits, token_of_ranked(bad), logit_of_ranked(bad)};
            }
            continue;
        }
        int chosen = -1;
        if (params.flags & kGreedy) {
            if (rank == 0 && thread == 0) chosen = token_of_ranked(best_edited);
        } else {
            RowSampler sampler{params, workspace, barrier, chunk, rank, blocks, logit_of_ranked(best_edited), bins, scratch, found};
            chosen = sampler.choose(random_bits(params.seed, params.counter));
            sampler.reset_workspace();
        }
        if (chosen >= 0) {
            tokens[row] = chosen;
            results[row] = {chosen, kNoError, 0, 0};
            all_params[row].counter = params.counter + 1;
            if (params.flags & kPenalised) counts[row * vocab + chosen]++;
        }
    }
}
