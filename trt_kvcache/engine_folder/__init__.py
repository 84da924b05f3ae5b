"""The folder that a build writes: its files, its ``config.json``, what ``inspect`` shows."""
