"""Engine folders: what a build writes and a runtime opens, their ``config.json``, and what ``inspect`` shows of them."""
