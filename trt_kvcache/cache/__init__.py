"""The KV cache: configurations, layouts, lengths and the cache managers."""
