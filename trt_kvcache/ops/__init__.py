"""Custom operations, in plugin layers or between segments, and the stages of an engine in segments."""
