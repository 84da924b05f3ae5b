"""How much one launch carries in its arguments, and the numbers there. The sources under ``plugins/`` have the same numbers."""

#: Host values that one launch of ``store_values`` carries.
MAX_STORED_VALUES = 16

#: Steps of a compaction that one launch carries, in each of its forms: an argument costs the host about 40 ns.
STEP_COUNTS = (8, 32, 96)

#: Steps of a compaction that one launch carries at most: enough for any mapping of 64 slots.
MAX_STEPS = STEP_COUNTS[-1]

#: Addresses of saved tensors that one launch carries: layers of one capture or restore.
MAX_SAVED = 64

#: Batch slots that a step can name: 16 bits, less one value.
MAX_SLOTS = 0xFFFF
