"""From prompts to token ids, from logits to tokens and text. Knows no cache."""
