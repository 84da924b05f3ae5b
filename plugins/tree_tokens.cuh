// Trees of draft tokens.
#pragma once

// Tokens of a tree, at most. trt_kvcache/kernels/token_tree.py has the same number.
constexpr int kMaxTreeTokens = 64;
