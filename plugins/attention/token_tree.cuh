// New tokens of a slot: a chain, in which each attends to all before it; or, compiled with TREE, a tree of draft tokens,
// in which each attends to its ancestors. trt_kvcache/kernels/token_tree.py has the same definition.
#pragma once

#ifdef TREE

constexpr bool kTree = true;

// The tree of each slot: [batch, width], bit j of token t is set if token j is an ancestor of it.
struct TokenTree {
    const unsigned long long* ancestors;

    // The ancestors of a token, and itself. Other bits are ignored, so that a token has at most `token` ancestors.
    __device__ __forceinline__ unsigned long long path(long long slot, long long width, int token) const {
        const unsigned long long own = 1ull << token;
        return (ancestors[slot * width + token] & (own - 1)) | own;
    }
    // Position of a token of a slot that held `past` tokens.
    __device__ __forceinline__ int position(int past, long long slot, long long width, int token) const {
        return past + __popcll(path(slot, width, token)) - 1;
    }
};

// A row of q among the tokens of its slot.
struct RowPlace {
    int position;
    unsigned long long path;

    // A row after the last of `count` tokens is treated as one of the last token.
    __device__ __forceinline__ void load(const TokenTree& tree, int past, int slot, int width, int token, int count) {
        path = tree.path(slot, width, min(token, count - 1));
        position = past + __popcll(path) - 1;
    }
    // Distance in positions to a key; negative if the row does not attend to it. past: the key of the first new token.
    __device__ __forceinline__ int distance_to(int key, int past) const {
        if (key < past) return position - key;
        const unsigned long long from_key = path >> min(key - past, 63);
        return from_key & 1 ? __popcll(from_key) - 1 : -1;
    }
};

#else

constexpr bool kTree = false;

struct TokenTree {
    __device__ __forceinline__ int position(int past, long long, long long, int token) const { return past + token; }
};

struct RowPlace {
    int position;

    __device__ __forceinline__ void load(const TokenTree&, int past, int, int, int token, int) {
        position = past + token;
    }
    __device__ __forceinline__ int distance_to(int key, int) const { return position - key; }
};

#endif
