"""The KV cache: configurations, layouts, lengths and the managers of the seeds."""
