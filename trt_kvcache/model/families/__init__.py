"""Families of Hugging Face models: the meaning of their ``config.json``, and the names of their weights."""
