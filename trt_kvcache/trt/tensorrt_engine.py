"""``TensorRTEngine``: runs a serialised TensorRT engine, of either flavour, built by this package or not.

Importing this module needs neither TensorRT nor CUDA. Its calls of TensorRT follow the documentation and are tested against
a recording stand-in; no engine has run on a GPU yet (see docs/gpu.md).
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from trt_kvcache.checkpoint.adapters.adapter_set import AdapterSet
from trt_kvcache.engine.embedding_rows import EMBEDDING_ROWS
from trt_kvcache.engine.hidden_tensors import HIDDEN_INPUTS, most_tokens
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.engine.slot_adapters import SlotAdapters
from trt_kvcache.engine.step_ancestors import StepAncestors
from trt_kvcache.engine.step_rows import StepRows
from trt_kvcache.engine_folder.config import EngineFolderConfig
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.v_outputs import v_output_nbytes
from trt_kvcache.errors import ConfigError, EngineError
from trt_kvcache.memory.base import Memory
from trt_kvcache.ops.int32_packing import packed_as_int32
from trt_kvcache.trt.adapter_buffers import AdapterBuffers
from trt_kvcache.trt.engine_bindings import EngineBindings, ProfileBindings
from trt_kvcache.trt.engine_sources import load_tensorrt_for, map_plan_file, require_gpu_memory, require_kernels
from trt_kvcache.trt.graph_engine import Enqueue, GraphEngine
from trt_kvcache.trt.int32_packed_view import Int32PackedView
from trt_kvcache.trt.loaded_plan import LoadedPlan
from trt_kvcache.trt.module import TensorRT, load
from trt_kvcache.trt.plugin import register
from trt_kvcache.trt.runtime_cache import network_key
from trt_kvcache.trt.tensors import add_plugin_aliases, compare_profiles, compare_tensors, count_binding_sets, read_profiles


class TensorRTEngine(GraphEngine):
    """A TensorRT engine in one piece (implements :class:`trt_kvcache.engine.protocol.StatefulEngine`).

    Made by :meth:`open`; a context manager. Not thread-safe.

    Parameters
    ----------
    tensorrt : TensorRT
        The TensorRT that deserialises the plan.
    plan : buffer
        The serialised engine.
    memory : Memory
        The GPU memory that it runs in.
    names : TensorNames
        Names of the engine's tensors.
    config : EngineFolderConfig or None
        ``config.json`` of its engine folder; None for a plan without a folder.
    plan_sha256 : str
        SHA-256 of the plan, in hex.
    cuda_graphs : bool
        True to run decode steps as CUDA graphs: see :meth:`open`.
    adapters : AdapterSet, optional
        Adapters of the model, of which each slot of a step takes the one that ``slot_adapters`` names for it. For an engine that was
        built with ``adapters_rank``.

    Attributes
    ----------
    tensors : mapping of str to TensorSpec
        Inputs and outputs by name, inputs first; of the whole engine, but for those that the engine binds: V outputs
        (``config.v_outputs``), inputs for adapters (``config.adapter_tensors``), for rows (``config.embedding_tensors``) and for trees
        (``config.tree_tensors``), and hidden states (``config.hidden_tensors``).
    profiles : sequence of EngineProfile
        The optimisation profiles, by index.
    memory : Memory
        The GPU memory that bound tensors must be in.
    config : EngineFolderConfig or None
        As given.
    names : TensorNames
        As given.
    slot_adapters : SlotAdapters or None
        The adapters of the slots of the next step; None without adapters.
    embeddings : EmbeddingRows or None
        Rows of token ids past the vocabulary, of an engine that was built with ``max_embeddings``.
    ancestors : StepAncestors or None
        The trees of the new tokens of the next step; None for an engine that takes chains only. Built with ``draft_tree`` it takes trees.
    hidden_states, hidden_inputs : StepRows or None
        Hidden states of the tokens of the last step, of an engine that was built with ``draft_head`` or of a draft head, and those that the
        next step of a draft head reads.

    Notes
    -----
    Each optimisation profile has a separate execution context, because switching the profile of a context discards its shapes. An engine
    with two buffers of states has two for each profile, with the addresses of either. Each CUDA graph has one too.
    The contexts share one context memory, so enqueue all of them on one stream, or wait in between.
    """

    def __init__(
        self,
        tensorrt: TensorRT,
        plan: Any,
        *,
        memory: Memory,
        names: TensorNames,
        config: EngineFolderConfig | None,
        plan_sha256: str,
        cuda_graphs: bool = True,
        adapters: AdapterSet | None = None,
    ) -> None:
        if adapters is not None and (config is None or config.adapters is None):
            got = "a plan without its folder" if config is None else "one without"
            raise ConfigError(f"adapters: expected an engine with inputs for them, got {got}. Build with adapters_rank.")
        network = plan_sha256 if config is None else network_key(config.network_facts())
        super().__init__(memory, tensorrt, network=network, cuda_graphs=cuda_graphs)
        self.config = config
        self.names = names
        self.slot_adapters: SlotAdapters | None = None
        self.ancestors: StepAncestors | None = None
        self.hidden_states: StepRows | None = None
        self.hidden_inputs: StepRows | None = None
        try:
            stream = memory.create_stream()  # makes the device current, which TensorRT then uses
            built_by = ""
            if config is not None:
                built_by = f" built with {config.tensorrt_flavour} {config.tensorrt_version}"
                if config.attention_variant == "plugin" and config.plugin_library is None:
                    register(tensorrt)
            v_outputs, trees, hidden = ((), (), ()) if config is None else (config.v_outputs, config.tree_tensors, config.hidden_tensors)
            own_tensors = () if config is None else (*config.adapter_tensors, *config.embedding_tensors, *trees, *hidden)
            has_library = config is not None and config.plugin_library is not None
            self._plan = LoadedPlan(tensorrt, plan, resources=self._resources, built_by=built_by, has_library=has_library)
            self.profiles = read_profiles(self._plan.ranges, names)
            if config is not None:
                if config.attention_variant == "plugin":
                    self._plan.tensors = add_plugin_aliases(self._plan.tensors, config.tensors)
                self._plan.tensors = compare_tensors(self._plan.tensors, [*map(packed_as_int32, config.tensors), *own_tensors, *v_outputs])
                compare_profiles(self.profiles, config.profiles)
                self.profiles = config.profiles  # with their names
            unpacked = Int32PackedView(self._plan, () if config is None else config.tensors)
            not_for_callers = {spec.name for spec in (*own_tensors, *v_outputs)}
            self.tensors = {name: spec for name, spec in unpacked.tensors.items() if name not in not_for_callers}
            num_sets = count_binding_sets(self.tensors, names)
            self._create_contexts([self._plan], num_sets=num_sets, stream=stream)
            contexts = range(num_sets * len(self.profiles))
            self._bind_v_outputs(v_outputs, contexts, stream)
            if config is not None and config.adapters is not None:
                self._bind_adapters(config, adapters, contexts, stream)
            if config is not None and config.max_embeddings:
                self.embeddings = self._make_embeddings(config)
                for context in contexts:
                    self._plan.set_tensor_address(context, EMBEDDING_ROWS, self.embeddings.table.ptr)
            self._bind_trees(trees, contexts)
            self._bind_hidden_states(hidden, contexts)
            memory.synchronize(stream)
            self._bindings = EngineBindings(
                type(self).__name__,
                tensors=self.tensors,
                ranges=unpacked.ranges,
                memory=memory,
                target=unpacked,
                num_sets=num_sets,
            )
        except BaseException:
            self._resources.close()
            raise

    @classmethod
    def open(
        cls,
        source: str | os.PathLike[str] | EngineFolder | bytes,
        *,
        memory: Memory,
        flavour: str = "auto",
        names: TensorNames | None = None,
        cuda_graphs: bool = True,
        adapters: AdapterSet | None = None,
    ) -> TensorRTEngine:
        """Deserialise an engine. Waits until it is ready.

        Parameters
        ----------
        source : path, EngineFolder or bytes
            An engine folder, the file of a serialised engine (a "plan"), or its bytes.
        memory : CudaMemory
            The GPU to run on.
        flavour : str
            ``"tensorrt"``, ``"tensorrt_rtx"``, or ``"auto"``: for an engine folder the flavour that built it, for a plan the one that
            is installed.
        names : TensorNames, optional
            Names of the engine's tensors; needed for an engine that this package did not build.
        cuda_graphs : bool
            True to run decode steps, verify steps and frequent prefills as CUDA graphs, as in :meth:`SegmentedEngine.open
            <trt_kvcache.trt.segmented_engine.SegmentedEngine.open>`.
        adapters : AdapterSet, optional
            Adapters of the model, for an engine folder that was built with ``adapters_rank``: see ``docs/adapters.md``. Without them such
            an engine runs the base model.

        Returns
        -------
        TensorRTEngine
            Ready to be bound. Close it after use.

        Raises
        ------
        PlaceError
            ``memory`` is not GPU memory.
        ConfigError
            The engine has no inputs for adapters, or not for these: of too high a rank in all, or of other linear layers.
        EngineError
            TensorRT is not there, or refuses the engine; or the engine is not what its folder says. The text holds what
            TensorRT logged.

        Examples
        --------
        >>> from trt_kvcache import CudaMemory
        >>> with TensorRTEngine.open("my-engine", memory=CudaMemory(0)) as engine:  # doctest: +SKIP
        ...     print([profile.name for profile in engine.profiles])
        ['prefill', 'decode']
        """
        require_gpu_memory(cls.__name__, memory)
        if isinstance(source, str | os.PathLike):
            path = Path(source)
            if not path.is_dir():
                with map_plan_file(path) as plan:
                    return cls._from_plan(plan, memory, flavour, names, cuda_graphs, adapters)
            source = EngineFolder.open(path)
        if not isinstance(source, EngineFolder):
            return cls._from_plan(source, memory, flavour, names, cuda_graphs, adapters)
        config = source.config
        if config.segments is not None:
            raise EngineError(f"{source.path}: expected an engine in one piece, got one in segments. Open it with SegmentedEngine.")
        if config.attention_variant == "plugin" and config.attention:
            require_kernels(cls.__name__, memory)
        tensorrt = load_tensorrt_for(source, flavour)
        with source.read_plan() as plan:
            return cls(
                tensorrt,
                plan,
                memory=memory,
                names=names or config.names,
                config=config,
                plan_sha256=config.plan.sha256,
                cuda_graphs=cuda_graphs,
                adapters=adapters,
            )

    @classmethod
    def _from_plan(
        cls,
        plan: bytes | mmap.mmap,
        memory: Memory,
        flavour: str,
        names: TensorNames | None,
        cuda_graphs: bool,
        adapters: AdapterSet | None,
    ) -> TensorRTEngine:
        digest = hashlib.sha256(plan).hexdigest()
        own = names or DEFAULT_NAMES
        return cls(
            load(flavour), plan, memory=memory, names=own, config=None, plan_sha256=digest, cuda_graphs=cuda_graphs, adapters=adapters
        )

    def _bind_adapters(self, config: EngineFolderConfig, adapters: AdapterSet | None, contexts: Sequence[int], stream: Any) -> None:
        """Upload the updates of adapters, and bind them in every context. Contexts of CUDA graphs copy the addresses."""
        assert config.adapters is not None
        buffers = AdapterBuffers(
            config.adapter_tensors, config.adapters, config.model, adapters, dtype=config.dtype, resources=self._resources, stream=stream
        )
        for name, address in buffers.addresses.items():
            for context in contexts:
                self._plan.set_tensor_address(context, name, address)
        self.slot_adapters = buffers.slot_adapters

    def _bind_trees(self, trees: Sequence[TensorSpec], contexts: Sequence[int]) -> None:
        """Bind the inputs for trees in every context. Contexts of CUDA graphs copy the addresses."""
        if not trees:
            return
        self.ancestors = StepAncestors(self.memory, max_slots=trees[0].shape[0], is_input=True)
        self._resources.callback(self.ancestors.close)
        addresses = self.ancestors.addresses
        for spec in trees:
            for context in contexts:
                self._plan.set_tensor_address(context, spec.name, addresses[spec.name])

    def _bind_hidden_states(self, hidden_tensors: Sequence[TensorSpec], contexts: Sequence[int]) -> None:
        """Allocate the rows of hidden states of the largest enqueue, and bind them in every context."""
        for spec in hidden_tensors:
            rows = StepRows(self.memory, max_tokens=most_tokens(self.profiles), width=spec.shape[-1], dtype=spec.dtype)
            self._resources.callback(rows.close)
            for context in contexts:
                self._plan.set_tensor_address(context, spec.name, rows.table.ptr)
            if spec.name == HIDDEN_INPUTS:
                self.hidden_inputs = rows
            else:
                self.hidden_states = rows

    def _bind_v_outputs(self, v_outputs: Sequence[TensorSpec], contexts: Sequence[int], stream: Any) -> None:
        """Allocate the memory of all V outputs, and bind it in every context. Contexts of CUDA graphs copy the addresses."""
        if not v_outputs:
            return
        sizes = v_output_nbytes(v_outputs, self.profiles)
        buffer = self._resources.allocate(sum(sizes), stream=stream)
        for spec, offset in zip(v_outputs, accumulate(sizes, initial=0), strict=False):
            for context in contexts:
                self._plan.set_tensor_address(context, spec.name, buffer.ptr + offset)

    def _step(self, active: ProfileBindings) -> Enqueue:
        return partial(_enqueue_plan, self._plan)


def _enqueue_plan(plan: LoadedPlan, context: int, stream: Any, handle: int) -> None:
    plan.enqueue(context, handle)
