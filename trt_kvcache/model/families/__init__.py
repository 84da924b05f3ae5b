"""Families of Hugging Face models: how the fields of ``config.json`` map to a description, and what the weights are called."""
