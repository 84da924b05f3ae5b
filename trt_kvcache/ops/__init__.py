"""Operations of ours that run between the segments of an engine."""
