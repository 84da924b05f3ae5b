"""GGUF files: configuration, tokenizer and weights of a model in one file, as llama.cpp writes them."""
