"""From prompts to token ids, and from logits to tokens and text. This package does not use caches."""
