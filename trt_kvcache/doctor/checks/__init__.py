"""The checks of ``doctor``, a module each: ``check(settings, log)``, called in a child process."""
