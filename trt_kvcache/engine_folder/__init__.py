"""Engine folders, which a build writes and a runtime opens: files, ``config.json``, inspection."""
