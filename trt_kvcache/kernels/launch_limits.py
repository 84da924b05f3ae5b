"""How many values one launch carries in its arguments. The sources under ``plugins/`` have the same numbers."""

from trt_kvcache.memory.shapes import MAX_BATCH_SIZE

#: Host values that one launch of ``store_values`` carries.
MAX_STORED_VALUES = 16

#: Moves that one launch of a compaction carries: its kernels exist in these sizes, because each argument costs the host about 40 ns.
MOVE_CAPACITIES = (8, 32, 96)

#: Moves that one launch of a compaction carries at most: enough for any mapping of 64 slots.
MAX_MOVES = MOVE_CAPACITIES[-1]

#: Addresses of saved tensors that one launch carries: layers of one capture or restore.
MAX_SAVED_TENSORS = 64

#: Batch slots that a move can name: 16 bits, less the one value that stands for the register.
MAX_SLOTS = MAX_BATCH_SIZE
