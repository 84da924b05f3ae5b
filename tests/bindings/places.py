"""Where the functions of TensorRT's own classes are in this release: found out by calling the bindings.

The numbers of virtual functions change between major releases, and headers of every release are not at hand. But each Python method of the
bindings calls one known C++ function. So an object whose every function writes down its place is given to the bindings, and each method
is called once: ``network.add_cast(...)`` shows the place of ``addCast``. Names are those of the headers (``NvInferImpl.h``).
"""

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_void_p
from typing import Any

from .cpp import TABLE_LENGTH, WORDS, Dims, Place, keep, raw_object

#: What a function returns while places are found out: the address that it is given to write ``Dims`` to.
_DIMS = object()

#: Layers: name of the C++ function, name in Python, and arguments; T is a tensor.
_LAYERS: dict[str, tuple[str, Callable[[Any, Any], tuple[Any, ...]]]] = {
    "addConstant": ("constant", lambda trt, t: ((3,), trt.Weights(trt.DataType.HALF, 4096, 3))),
    "addShuffle": ("shuffle", lambda trt, t: (t,)),
    "addGather": ("gather", lambda trt, t: (t, t, 0)),
    "addGatherV2": ("gather_v2", lambda trt, t: (t, t, trt.GatherMode.ND)),
    "addElementWise": ("elementwise", lambda trt, t: (t, t, trt.ElementWiseOperation.SUM)),
    "addMatrixMultiply": ("matrix_multiply", lambda trt, t: (t, trt.MatrixOperation.NONE, t, trt.MatrixOperation.NONE)),
    "addReduce": ("reduce", lambda trt, t: (t, trt.ReduceOperation.AVG, 1, True)),
    "addUnary": ("unary", lambda trt, t: (t, trt.UnaryOperation.SQRT)),
    "addCast": ("cast", lambda trt, t: (t, trt.DataType.HALF)),
    "addActivation": ("activation", lambda trt, t: (t, trt.ActivationType.SIGMOID)),
    "addShape": ("shape", lambda trt, t: (t,)),
    "addFillV2": ("fill", lambda trt, t: ((1,), trt.FillOperation.LINSPACE, trt.DataType.INT32)),
    "addSlice": ("slice", lambda trt, t: (t, (1,), (1,), (1,))),
    "addConcatenation": ("concatenation", lambda trt, t: ([t],)),
    "addDequantize": ("dequantize", lambda trt, t: (t, t, trt.DataType.HALF)),
    "addSelect": ("select", lambda trt, t: (t, t, t)),
    "addSoftMax": ("softmax", lambda trt, t: (t,)),
    "addRotaryEmbedding": ("rotary_embedding", lambda trt, t: (t, t, t, False, 0)),
    "addKVCacheUpdate": ("kv_cache_update", lambda trt, t: (t, t, t, trt.KVCacheMode.LINEAR)),
    "addAttention": ("attention", lambda trt, t: (t, t, t, trt.AttentionNormalizationOp.SOFTMAX, False)),
    "addAttentionV2": ("attention_v2", lambda trt, t: (t, t, t, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE)),
}


class _Watch:
    """Makes objects that write down which of their functions are called, and keeps the places that were found."""

    def __init__(self) -> None:
        self.places: dict[str, dict[str, Place]] = {}
        self._called: list[Place] = []
        self._result: Any = 0

    def object(self) -> int:
        kind = CFUNCTYPE(c_void_p, c_void_p)
        tables = [{number: kind(self._recorder((word, number))) for number in range(TABLE_LENGTH)} for word in range(WORDS)]
        return raw_object(tables)[0]

    def _recorder(self, place: Place) -> Callable[[int], int]:
        def record(first: int) -> Any:
            self._called.append(place)
            if self._result is not _DIMS:
                return self._result
            ctypes.memset(first, 0, ctypes.sizeof(Dims))
            return first

        return record

    def find(self, interface: str, name: str, call: Callable[[], Any], result: Any = 0, *, which: int = 0) -> Any:
        """Call the bindings; write down the place of the function that they called as that of ``name``."""
        self._called.clear()
        self._result = result
        try:
            returned = call()
        except RuntimeError:  # the bindings refuse what the function returned, after calling it
            returned = None
        assert self._called, f"{interface}.{name}: the bindings called nothing"
        self.places.setdefault(interface, {})[name] = self._called[which]
        return returned


def find_places(trt: Any, set_global: Callable[[str, int], None]) -> dict[str, dict[str, Place]]:
    """Return the places of the functions that the stand-in has, by class and name; ``set_global`` sets a variable of the stub."""
    watch = _Watch()
    logger = keep(_empty(trt.ILogger))
    set_global("bindings_builder", watch.object())
    set_global("bindings_runtime", watch.object())
    set_global("bindings_registry", watch.object())
    network = _find_builder(watch, trt, keep(trt.Builder(logger)))
    _find_network(watch, trt, network)
    _find_runtime(watch, trt, keep(trt.Runtime(logger)))
    _find_registry(watch, trt)
    return watch.places


def _empty(base: Any) -> Any:
    """Return an object of a Python class that is derived from one of the bindings, and does nothing."""

    class Empty(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

    return Empty()


def _find_builder(watch: _Watch, trt: Any, builder: Any) -> Any:
    find = watch.find
    network = keep(find("IBuilder", "createNetworkV2", lambda: builder.create_network(0), watch.object()))
    config = keep(find("IBuilder", "createBuilderConfig", builder.create_builder_config, watch.object()))
    profile = keep(find("IBuilder", "createOptimizationProfile", builder.create_optimization_profile, watch.object()))
    host = keep(find("IBuilder", "buildSerializedNetwork", lambda: builder.build_serialized_network(network, config), watch.object()))

    find("IHostMemory", "data", lambda: memoryview(host), 4096, which=-1)
    find("IHostMemory", "size", lambda: host.nbytes)
    find("IHostMemory", "type", lambda: host.dtype)

    find("IOptimizationProfile", "setDimensions", lambda: profile.set_shape("x", (1,), (2,), (3,)), 1)
    find("IOptimizationProfile", "isValid", lambda: bool(profile))

    monitor = keep(_empty(trt.IProgressMonitor))
    find("IBuilderConfig", "addOptimizationProfile", lambda: config.add_optimization_profile(profile))
    find("IBuilderConfig", "clearFlag", lambda: config.clear_flag(trt.BuilderFlag.TF32))
    find("IBuilderConfig", "setPreviewFeature", lambda: config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True))
    find("IBuilderConfig", "setPluginsToSerialize", lambda: setattr(config, "plugins_to_serialize", ["x"]))
    find("IBuilderConfig", "setProgressMonitor", lambda: setattr(config, "progress_monitor", monitor))
    return network


def _find_network(watch: _Watch, trt: Any, network: Any) -> None:
    find, half = watch.find, trt.DataType.HALF
    tensor = keep(find("INetworkDefinition", "addInput", lambda: network.add_input("x", half, (1,)), watch.object()))
    find("INetworkDefinition", "markOutput", lambda: network.mark_output(tensor))
    find("INetworkDefinition", "setName", lambda: setattr(network, "name", "x"))
    find("ITensor", "setName", lambda: setattr(tensor, "name", "x"))
    find("ITensor", "getName", lambda: tensor.name)
    find("ITensor", "getDimensions", lambda: tensor.shape, _DIMS)
    find("ITensor", "getType", lambda: tensor.dtype)

    layers = {}
    for name, (kind, arguments) in _LAYERS.items():
        if hasattr(trt.INetworkDefinition, f"add_{kind}"):
            add = getattr(network, f"add_{kind}")
            layers[name] = keep(find("INetworkDefinition", name, lambda: add(*arguments(trt, tensor)), watch.object()))  # noqa: B023
    plugin = keep(_empty(trt.IPluginV3))
    find("INetworkDefinition", "addPluginV3", lambda: network.add_plugin_v3([tensor], [], plugin), watch.object())
    shuffle, gather = layers["addShuffle"], layers["addGatherV2"]
    find("ILayer", "setName", lambda: setattr(shuffle, "name", "x"))
    find("ILayer", "getName", lambda: shuffle.name)
    find("ILayer", "getOutput", lambda: shuffle.get_output(0))
    find("ILayer", "setInput", lambda: shuffle.set_input(1, tensor))
    find("IShuffleLayer", "setFirstTranspose", lambda: setattr(shuffle, "first_transpose", (0, 1)))
    find("IShuffleLayer", "setReshapeDimensions", lambda: setattr(shuffle, "reshape_dims", (0, 1)))
    find("IShuffleLayer", "setSecondTranspose", lambda: setattr(shuffle, "second_transpose", (0, 1)))
    find("IGatherLayer", "setNbElementWiseDims", lambda: setattr(gather, "num_elementwise_dims", 1))
    find("IShuffleLayer", "setZeroIsPlaceholder", lambda: setattr(shuffle, "zero_is_placeholder", False))
    find("IGatherLayer", "setGatherAxis", lambda: setattr(gather, "axis", 1))
    find("ISliceLayer", "setMode", lambda: setattr(layers["addSlice"], "mode", trt.SampleMode.FILL))
    find("IConcatenationLayer", "setAxis", lambda: setattr(layers["addConcatenation"], "axis", 1))
    dequantize = layers["addDequantize"]
    find("IDequantizeLayer", "setAxis", lambda: setattr(dequantize, "axis", 1))
    if hasattr(trt.IDequantizeLayer, "block_shape"):
        find("IDequantizeLayer", "setBlockShape", lambda: setattr(dequantize, "block_shape", (1, 16)), 1)
    softmax = layers["addSoftMax"]
    find("ISoftMaxLayer", "setAxes", lambda: setattr(softmax, "axes", 1))
    if "addAttention" in layers:
        attention = layers["addAttention"]
        find("IAttention", "setName", lambda: setattr(attention, "name", "x"))
        find("IAttention", "getName", lambda: attention.name)
        find("IAttention", "getOutput", lambda: attention.get_output(0))
        find("IAttention", "setMask", lambda: setattr(attention, "mask", tensor), 1)
        find("IAttention", "setDecomposable", lambda: setattr(attention, "decomposable", True), 1)
        if hasattr(trt.IAttention, "key_value_lengths"):
            find("IAttention", "setKeyValueLengths", lambda: setattr(attention, "key_value_lengths", tensor), 1)


def _find_runtime(watch: _Watch, trt: Any, runtime: Any) -> None:
    find = watch.find
    find("IRuntime", "setEngineHostCodeAllowed", lambda: setattr(runtime, "engine_host_code_allowed", True))
    engine = keep(find("IRuntime", "deserializeCudaEngine", lambda: runtime.deserialize_cuda_engine(b"plan"), watch.object()))
    find("ICudaEngine", "getNbIOTensors", lambda: engine.num_io_tensors)
    find("ICudaEngine", "getIOTensorName", lambda: engine.get_tensor_name(0))
    find("ICudaEngine", "getNbOptimizationProfiles", lambda: engine.num_optimization_profiles)
    find("ICudaEngine", "getTensorLocation", lambda: engine.get_tensor_location("x"))
    find("ICudaEngine", "getTensorIOMode", lambda: engine.get_tensor_mode("x"))
    find("ICudaEngine", "getTensorDataType", lambda: engine.get_tensor_dtype("x"))
    find("ICudaEngine", "getTensorShape", lambda: engine.get_tensor_shape("x"), _DIMS)
    find("ICudaEngine", "getProfileShape", lambda: engine.get_tensor_profile_shape("x", 0), _DIMS)
    find("ICudaEngine", "getDeviceMemorySizeForProfileV2", lambda: engine.get_device_memory_size_for_profile_v2(0))
    if hasattr(trt.ICudaEngine, "get_aliased_input_tensor"):
        find("ICudaEngine", "getAliasedInputTensor", lambda: engine.get_aliased_input_tensor("x"))
    strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    context = keep(find("ICudaEngine", "createExecutionContext", lambda: engine.create_execution_context(strategy), watch.object()))
    find("IExecutionContext", "setOptimizationProfileAsync", lambda: context.set_optimization_profile_async(0, 0), 1)
    find("IExecutionContext", "setDeviceMemoryV2", lambda: context.set_device_memory(4096, 1), 1)
    find("IExecutionContext", "setTensorAddress", lambda: context.set_tensor_address("x", 4096), 1)
    find("IExecutionContext", "setInputShape", lambda: context.set_input_shape("x", (1,)), 1)
    find("IExecutionContext", "getTensorShape", lambda: context.get_tensor_shape("x"), _DIMS)
    find("IExecutionContext", "enqueueV3", lambda: context.execute_async_v3(4096), 1)


def _find_registry(watch: _Watch, trt: Any) -> None:
    registry = trt.get_plugin_registry()
    creator = keep(_empty(trt.IPluginCreatorV3One))
    watch.find("IPluginRegistry", "registerCreator", lambda: registry.register_creator(creator, "x"))
    watch.find("IPluginRegistry", "deregisterCreator", lambda: registry.deregister_creator(creator))
    watch.find("IPluginRegistry", "loadLibrary", lambda: registry.load_library("x"))
    watch.find("IPluginRegistry", "getCreator", lambda: registry.get_creator("x", "1", "x"))
