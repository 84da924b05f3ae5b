"""``Progress``: the callback of long work, such as a build or reading weights."""

from collections.abc import Callable

#: Called as ``progress(stage, done)``: the stage of the work, and the fraction of it that is done, from 0 to 1, or None while not known.
Progress = Callable[[str, float | None], object]
