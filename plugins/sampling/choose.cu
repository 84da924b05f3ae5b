// Chooses a token for each row of logits. Launched by trt_kvcache/kernels/cuda/sampling.py; README.md describes it.
// Grid: the blocks of a row, then rows; each group of blocks takes one row after another.

#include "dependent_launch.cuh"
#include "sampling/histogram.cuh"
#include "sampling/philox.cuh"
#include "sampling/row_barrier.cuh"
#include "sampling/row_exchange.cuh"
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
    RowExchange& exchange;
    RowChunk chunk;
    float largest;
    unsigned* bins;    // shared memory
    Number* scratch;   // shared memory
    FoundBin* found;   // shared memory
    int fine_bins[kFineSlots]{-1, -1, -1, -1, -1};  // the coarse bin that each of row.fine_count holds
    int num_fine = 0;

    __device__ __forceinline__ unsigned class_at(float logit) const { return class_of(largest, logit, params.scale); }

    // The token that random bits choose; -1 in all threads but the one, of all blocks, that finds it.
    __device__ __forceinline__ int choose(unsigned long long random) {
        LastKept last{kClasses, 0, 0x7FFFFFFF};
        if (!params.top_k && !params.top_p) return choose_by_id(last, random);
        add_weights(chunk, exchange.rank, row, bins, params.top_k, [&](float logit) { return class_at(logit); });
        if (params.top_p && params.min_weight) add_likely_weight();
        barrier.wait();
        Border border{kClasses, 0, 0};
        if (params.top_k) border = keep_top_k(last);
        if (!params.top_p) return choose_by_id(last, random);
        const Border chosen = choose_by_class(border, random);
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

    // The class in which the random number falls, the most likely first, and how many of its tokens are up to there. `kept`: what top_k keeps.
    __device__ __forceinline__ Border choose_by_class(const Border& kept, unsigned long long random) {
        const BinSums<kCoarseBins> weights(scratch, [&](int bin) { return row.coarse_weight[bin]; });
        const unsigned long long shifted = params.top_p << 11;
        const Number all = kept.token_class == kClasses ? weights.total : kept.weight;
        const Number wanted = __umul64hi(shifted, all) + (shifted * all != 0), likely = params.min_weight ? row.likely_weight : all;
        const FoundBin last = weights.find(wanted - 1, found);
        // Where the random number falls depends on where top_p ends; but nearly always the ends of its bin say so too.
        const FoundBin most = weights.find(__umul64hi(random << 11, min(last.before + last.value, likely)), found);
        int least = most.bin;  // the other end matters only where much of the weight is in that bin
        if (last.value > last.before / 8) least = weights.find(__umul64hi(random << 11, min(last.before, likely)), found).bin;
        count_fine(last.bin, most.bin, least);
        const Number target = __umul64hi(random << 11, min(border_in(last, wanted - 1).weight, likely));
        const FoundBin chosen = weights.find(target, found);
        count_fine(chosen.bin, chosen.bin, chosen.bin);
        return border_in(chosen, target);
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

    // Of a coarse bin whose classes are counted.
    __device__ __forceinline__ const unsigned* fine_counts(int coarse_bin) const {
        const unsigned* counts = nullptr;
#pragma unroll
        for (int i = 0; i < kFineSlots; i++) counts = fine_bins[i] == coarse_bin ? row.fine_count[i] : counts;
        return counts;
    }

    __device__ __forceinline__ void add_fine_bin(int coarse_bin) {
        if (fine_counts(coarse_bin)) return;
#pragma unroll
        for (int i = 0; i < kFineSlots; i++) fine_bins[i] = i == num_fine ? coarse_bin : fine_bins[i];
        num_fine++;
    }

    __device__ __forceinline__ int bin_of_slot(int slot) const {
        int bin = -2;  // which no token has
#pragma unroll
        for (int i = 0; i < kFineSlots; i++) bin = i == slot && i < num_fine ? fine_bins[i] : bin;
        return bin;
    }

    // Counts the classes of three coarse bins, of each unless that was done before.
    __device__ __forceinline__ void count_fine(int a, int b, int c) {
        const int before = num_fine;
        add_fine_bin(a);
        add_fine_bin(b);
        add_fine_bin(c);
        if (num_fine == before) return;
        const int first = bin_of_slot(before), second = bin_of_slot(before + 1), third = bin_of_slot(before + 2);
        add_counts(chunk, exchange.rank, (num_fine - before) * kFineBins, row.fine_count[before], bins, [&](int, float logit) {
            const unsigned token_class = class_at(logit);
            const int coarse = token_class < kClasses ? static_cast<int>(token_class >> kFineBits) : -1;
            const int bin = static_cast<int>(token_class % kFineBins);
            return coarse == first ? bin : coarse == second ? kFineBins + bin : coarse == third ? 2 * kFineBins + bin : -1;
        });
        barrier.wait();
    }

    // The border at which the weight of all tokens, the most likely first, exceeds the target, which is in a coarse bin.
    __device__ __forceinline__ Border border_in(const FoundBin& coarse, Number target) {
        const unsigned* const counts = fine_counts(coarse.bin);
        const unsigned first_class = static_cast<unsigned>(coarse.bin) << kFineBits;
        const BinSums<kFineBins> weights(scratch, [&](int bin) -> Number { return counts[bin] ? counts[bin] * weight_of(first_class + bin) : 0; });
        const FoundBin fine = weights.find(target - coarse.before, found);
        const unsigned token_class = first_class + fine.bin;
        const Weight weight = weight_of(token_class);
        const Number before = coarse.before + fine.before, members = (target - before) / weight + 1;
        return {token_class, members, before + members * weight};
    }

    // Finds the last token that top_k keeps. The border's class is kClasses if all tokens that have a weight are kept.
    __device__ __forceinline__ Border keep_top_k(LastKept& last) {
        const Number wanted = static_cast<Number>(params.top_k);
        const FoundBin coarse = BinSums<kCoarseBins>(scratch, [&](int bin) -> Number { return row.coarse_count[bin]; }).find(wanted - 1, found);
        if (coarse.bin < 0) return {kClasses, 0, 0};
        count_fine(coarse.bin, coarse.bin, coarse.bin);
        const unsigned* const counts = fine_counts(coarse.bin);
        const FoundBin fine =
            BinSums<kFineBins>(scratch, [&](int bin) -> Number { return counts[bin]; }).find(wanted - 1 - coarse.before, found);
        const unsigned first_class = static_cast<unsigned>(coarse.bin) << kFineBits, token_class = first_class + fine.bin;
        const Number members = wanted - coarse.before - fine.before;
        Number weight = 0;
        if (params.top_p) {
            for (int bin = threadIdx.x; bin < coarse.bin; bin += kRowThreads) weight += row.coarse_weight[bin];
            for (int bin = threadIdx.x; bin < fine.bin; bin += kRowThreads) weight += counts[bin] ? counts[bin] * weight_of(first_class + bin) : 0;
            weight = block_prefix_sum(weight, scratch).total + members * weight_of(token_class);
        }
        last = {token_class, 0, 0x7FFFFFFF};
        if (members < fine.value) last = break_ties(token_class, members);
        return {token_class, members, weight};
    }

    // The last one of so many tokens of a class: those of the largest logits; of equal logits, those of the lowest ids.
    __device__ __forceinline__ LastKept break_ties(unsigned of_class, Number members) {
        unsigned prefix = 0;  // high digits of the complement of the order: the largest logits have the smallest ones
        for (int digit = 0, shift = 21; digit < 3; digit++, shift = max(shift - kFineBits, 0)) {
            const int bits = digit < 2 ? kFineBits : 10;
            unsigned* const counts = row.order_count[digit];
            add_counts(chunk, exchange.rank, 1 << bits, counts, bins, [&](int, float logit) {
                const unsigned order = ~order_of(logit);
                const bool is_member = class_at(logit) == of_class && (digit == 0 || order >> (shift + bits) == prefix);
                return is_member ? static_cast<int>(order >> shift & ((1u << bits) - 1)) : -1;
            });
            barrier.wait();
            const FoundBin bin = BinSums<kFineBins>(scratch, [&](int bin) -> Number { return counts[bin]; }).find(members - 1, found);
            members -= bin.before;
            prefix = prefix << bits | static_cast<unsigned>(bin.bin);
        }
        const unsigned order = ~prefix;
        const int token = find_token([&](int, float logit) -> Number { return class_at(logit) == of_class && order_of(logit) == order; },
                                     [&](Number) { return members - 1; });
        const Number of_block = block_max(token + 1, scratch);
        return {of_class, order, static_cast<int>(block_max(exchange.with_all({of_block, 0}).number, scratch)) - 1};
    }

    // The first token, by its id, with which the sum of value_of(token, logit) exceeds target_of(sum of all); -1 in all other threads.
    template <class ValueOf, class TargetOf>
    __device__ __forceinline__ int find_token(ValueOf value_of, TargetOf target_of) {
        Number own = 0;
        chunk.for_each([&](int token, float logit) { own += value_of(token, logit); });
        const PrefixSum in_block = block_prefix_sum(own, scratch);
        const Number before_warp = __shfl_sync(~0u, in_block.before, 0), up_to_warp = __shfl_sync(~0u, in_block.before + own, 31);
        const PrefixSum of_blocks = block_prefix_sum(exchange.with_all({in_block.total, 0}).number, scratch);
        if (static_cast<int>(threadIdx.x) == exchange.rank) found->before = of_blocks.before;
        __syncthreads();
        const Number target = target_of(of_blocks.total) - found->before;  // may be negative, and so very large
        return before_warp <= target && target < up_to_warp ? find_in_run(target - before_warp, value_of) : -1;
    }

    // The same within the run of a warp. For all of its lanes.
    template <class ValueOf>
    __device__ __forceinline__ int find_in_run(Number target, ValueOf value_of) const {
        const int run = RowChunk::run(chunk.end - chunk.begin), tokens = run / 32;
        const int first = chunk.begin + static_cast<int>(threadIdx.x) / 32 * run + static_cast<int>(threadIdx.x) % 32 * tokens;
        const int end = min(first + tokens, chunk.end);
        Number own = 0;
#pragma unroll 4
        for (int token = first; token < end; token++) own += value_of(token, chunk.logits[token]);
        Number sum = warp_prefix_sum(own) - own;
        if (target < sum || target >= sum + own) return -1;
        int token = first;
        for (Number value; sum + (value = value_of(token, chunk.logits[token])) <= target; token++) sum += value;
        return token;
    }

    // Once all blocks have taken what they need.
    __device__ __forceinline__ void reset_workspace() const {
        const int first = exchange.rank * kRowThreads + threadIdx.x, step = exchange.blocks * kRowThreads;
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

// The largest logits of a block, as ranked(): as they came, and after bias and penalties.
struct Largest {
    Number raw = 0, edited = 0;
};

__device__ __forceinline__ Largest find_largest(const RowChunk& chunk, Number* scratch) {
    Number best = 0;
    chunk.for_each([&](int token, float logit) { best = max(best, ranked(logit, token)); });
    best = block_max(best, scratch);
    return {best, best};
}

struct LogitWithEdits {
    float logit, bias;
    unsigned uses;
};

// uses [vocab] and bias [vocab] of the row, or null; edited [vocab].
__device__ __forceinline__ Largest edit_and_find_largest(const RowChunk& chunk, const RowParams& params, const unsigned* uses, const float* bias,
                                                         float* edited, Number* scratch) {
    Largest best;
    const auto load = [&](int token, bool exists) -> LogitWithEdits {
        return {exists ? chunk.logits[token] : __uint_as_float(0xFF800000u), exists && bias ? bias[token] : 0, exists && uses ? uses[token] : 0};
    };
    chunk.for_each(chunk.begin, chunk.end, load, [&](int token, const LogitWithEdits& one) {
        best.raw = max(best.raw, ranked(one.logit, token));
        if (token >= chunk.end) return;
        const float changed = edited_logit(one.logit, params, one.bias, one.uses);
        best.edited = max(best.edited, ranked(changed, token));
        edited[token] = changed;
    });
    return {block_max(best.raw, scratch), block_max(best.edited, scratch)};
}

// tokens[row] = the token that a row chooses; 0 if it cannot. Rows that are not active keep theirs.
// counts [rows, vocab] and bias [rows, vocab] may be null where no row asks for them; edited [groups, vocab] with them.
extern "C" __global__ void __launch_bounds__(kRowThreads, 2)
    choose_tokens(const float* logits, long long row_stride, long long vocab, long long rows, RowParams* all_params, unsigned* counts,
                  const float* bias, float* edited, int* tokens, RowResult* results, RowWorkspace* workspaces, long long blocks_of_row) {
    SHARED_ARRAY(unsigned, bins, kSharedBins);
    SHARED_ARRAY(Number, scratch, kWarpsOfBlock);
    SHARED_ARRAY(FoundBin, found, 1);
    const int blocks = static_cast<int>(blocks_of_row), group = static_cast<int>(blockIdx.x) / blocks, rank = static_cast<int>(blockIdx.x) % blocks;
    const int groups = static_cast<int>(gridDim.x) / blocks, size = RowChunk::run((static_cast<int>(vocab) + blocks - 1) / blocks) * kWarpsOfBlock;
    const int begin = min(static_cast<int>(vocab), rank * size), end = min(static_cast<int>(vocab), begin + size);
    RowWorkspace& workspace = workspaces[group];
    clear_bins(bins);
    grid_dependency_wait();
    grid_dependents_may_launch();
    RowBarrier barrier(&workspace.at_barriers, static_cast<unsigned>(blocks));
    RowExchange exchange(workspace, rank, blocks);
    for (long long row = group; row < rows; row += groups) {
        const RowParams params = all_params[row];
        if (!(params.flags & kActive)) continue;
        RowChunk chunk{logits + row * row_stride, begin, end};
        Largest best;
        const bool is_edited = params.flags & (kPenalised | kBiased);
        if (is_edited) {
            float* const into = edited + group * vocab;
            best = edit_and_find_largest(chunk, params, params.flags & kPenalised ? counts + row * vocab : nullptr,
                                         params.flags & kBiased ? bias + row * vocab : nullptr, into, scratch);
            chunk.logits = into;
        } else {
            best = find_largest(chunk, scratch);
        }
        const Said heard = exchange.with_all({best.edited, static_cast<unsigned>(best.raw >> 32)});
        const Number largest = block_max(heard.number, scratch);
        // With the block that has the largest logit as it came, the first of them.
        const Number raw = is_edited ? block_max(static_cast<Number>(heard.extra) << 32 | (~0u - threadIdx.x), scratch) : largest;
        const bool is_good = is_finite(logit_of_ranked(raw));
        if (!is_good || !is_finite(logit_of_ranked(largest))) {
            const Number bad = is_good || !is_edited ? largest : best.raw;
            if (rank == (is_good || !is_edited ? 0 : token_of_ranked(raw)) && threadIdx.x == 0) {
                tokens[row] = 0;  // the next enqueue may already be on its way with it
                results[row] = {-1, is_good ? kNothingLeft : kBadLogits, token_of_ranked(bad), logit_of_ranked(bad)};
            }
            continue;
        }
        int chosen = -1;
        if (params.flags & kGreedy) {
            if (rank == 0 && threadIdx.x == 0) chosen = token_of_ranked(largest);
        } else {
            RowSampler sampler{params, workspace, barrier, exchange, chunk, logit_of_ranked(largest), bins, scratch, found};
            chosen = sampler.choose(random_bits(params.seed, params.counter));
            sampler.reset_workspace();
        }
        if (chosen >= 0) {
            tokens[row] = chosen;
            results[row] = {chosen, kNoError, 0, 0};
            all_params[row].counter = params.counter + 1;
            if (params.flags & kPenalised) counts[row * vocab + chosen]++;
        }
        __syncthreads();  // one warp reads `edited` longest
    }
    exchange.finish();
}
