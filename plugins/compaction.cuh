// Compaction in place: moving the contents of batch slots to other slots.
//
// The host turns a batch mapping into moves (source, destination, tokens); a cycle is opened by a move into a register
// and closed by one out of it (trt_kvcache/kernels/compaction_moves.py). A thread owns a column, vectors at the same
// place in every slot, and carries out all moves for it, in order. No two threads touch the same bytes, so threads
// never wait for each other, and no scratch memory is needed.
#pragma once

#include "argument_lists.cuh"
#include "shared_memory.cuh"
#include "vector_copy.cuh"

// In the place of a slot number: the thread's register. kernels/compaction_moves.py has the same number.
constexpr int kRegister = 0xFFFF;

// Copy the first `tokens` tokens of slot `source` to slot `destination`; either may be kRegister.
struct Move {
    int source, destination;
    long long tokens;
};

// A move in 64 bits: from bit 47 the source (16 bits), from bit 31 the destination (16 bits), below it the tokens (31
// bits).
__device__ __forceinline__ Move unpack_move(long long move) {
    return {static_cast<int>(move >> 47), static_cast<int>(move >> 31 & 0xFFFF), move & 0x7FFFFFFF};
}

// Moves that the host listed in the arguments of the launch.
struct ListedMoves {
    const long long* packed;  // in shared memory
    int count;
    long long max_tokens;  // of one move

    __device__ __forceinline__ Move operator[](int index) const { return unpack_move(packed[index]); }
};

// Stores the list in shared memory, for all threads of the block, with a barrier behind it.
template <int kCount>
__device__ __forceinline__ ListedMoves share_moves(long long* shared, const long long (&packed)[kCount],
                                                   long long count, long long max_tokens) {
    if (threadIdx.x < kCount) shared[threadIdx.x] = select_value(packed, threadIdx.x);
    __syncthreads();
    return {shared, static_cast<int>(count), max_tokens};
}

// Moves of a mapping on the device that keeps the order: slot i goes to slot mapping[i] < i. Any other entry moves
// nothing.
struct MappedMoves {
    const int *mapping, *lengths;
    int count;
    long long max_sequence_length;  // lengths are cut to it
    long long tokens_per_row;       // a move counts rows
    long long max_tokens;

    __device__ __forceinline__ Move operator[](int index) const {
        const int destination = mapping[index];
        const bool moves = 0 <= destination && destination < index;
        const long long tokens = moves ? (lengths[index] + tokens_per_row - 1) / tokens_per_row : 0;
        return {index, moves ? destination : index, tokens < max_sequence_length ? tokens : max_sequence_length};
    }
};

__device__ __forceinline__ MappedMoves read_mapping(const int* mapping, const int* lengths, long long count,
                                                    long long max_sequence_length, long long tokens_per_row = 1) {
    MappedMoves moves{mapping, lengths, static_cast<int>(count), max_sequence_length, tokens_per_row, 0};
    for (int i = 0; i < moves.count; i++) {
        const long long tokens = moves[i].tokens;
        moves.max_tokens = tokens > moves.max_tokens ? tokens : moves.max_tokens;
    }
    return moves;
}

// Vectors of a slot that a move copies: a number per token (K/V), or a fixed number (states).
struct Extent {
    long long per_token, fixed;

    __device__ __forceinline__ long long operator()(long long tokens) const { return per_token * tokens + fixed; }
};

// The columns of a thread: vector `first` of every slot, and every blockDim.x-th from there on, kInFlight in all.
template <class Vector>
struct Columns {
    unsigned char* slots;
    long long slot_stride, first;
    Vector held[kInFlight];  // the register

    __device__ __forceinline__ void load(const Move& move, long long end, Vector (&vectors)[kInFlight]) const {
        if (first >= end || move.source == move.destination) return;
        const Vector* from = reinterpret_cast<const Vector*>(slots + move.source * slot_stride) + first;
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            const long long offset = i * static_cast<long long>(blockDim.x);
            if (first + offset < end) vectors[i] = move.source == kRegister ? held[i] : from[offset];
        }
    }
    __device__ __forceinline__ void store(const Move& move, long long end, const Vector (&vectors)[kInFlight]) {
        if (first >= end || move.source == move.destination) return;
        Vector* to = reinterpret_cast<Vector*>(slots + move.destination * slot_stride) + first;
#pragma unroll
        for (int i = 0; i < kInFlight; i++) {
            const long long offset = i * static_cast<long long>(blockDim.x);
            if (move.destination == kRegister) {
                held[i] = vectors[i];
            } else if (first + offset < end) {
                to[offset] = vectors[i];
            }
        }
    }
};

// Executes all moves. A move stores its registers while the next one loads. No move loads what the move before it
// stores, because every slot is read before it is overwritten.
template <class Vector, class Moves>
__device__ __forceinline__ void compact_columns(unsigned char* slots, long long slot_stride, const Moves& moves,
                                                Extent extent) {
    const long long end = moves.count ? extent(moves.max_tokens) : 0;
    for (long long first = first_vector(); first < end; first += grid_vectors()) {
        Columns<Vector> columns{slots, slot_stride, first, {}};
        Move move = moves[0];
        Vector vectors[kInFlight] = {};
        columns.load(move, extent(move.tokens), vectors);
        for (int m = 1; m < moves.count; m++) {
            const Move next = moves[m];
            Vector loaded[kInFlight] = {};
            columns.load(next, extent(next.tokens), loaded);
            columns.store(move, extent(move.tokens), vectors);
            move = next;
#pragma unroll
            for (int i = 0; i < kInFlight; i++) vectors[i] = loaded[i];
        }
        columns.store(move, extent(move.tokens), vectors);
    }
}
