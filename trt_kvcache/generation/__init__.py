"""Prompts to token ids, and logits to tokens and text. This package does not use caches."""
