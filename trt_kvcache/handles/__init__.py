"""Sequences by handle over the slots of a cache, swapped to the host when slots run out. Nothing else of the package needs it."""
