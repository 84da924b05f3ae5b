"""TensorRT's builder and runtime, played by Python behind the real bindings: what is built can be opened and enqueued.

Real are the bindings: conversion of arguments and results, lifetimes, callbacks (log, progress, plugins), and what exists in a release.
The stand-in knows of TensorRT what its headers say. What TensorRT itself does stays unverified: whether it accepts a network, whether it
has kernels for it, what these compute, where it puts copies, in which order and how often it calls a plugin, what its log says.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cpp import CppObject, Dims, call, function, keep, object_at, take_over
from .network import BF16, FLOAT, HALF, INT32, INT64, Network, Places, Shape
from .places import find_places
from .plugin_calls import Creator, Field, Plugin, Typed, fields, in_a_thread

_INPUT, _OUTPUT, _DEVICE, _BUILD, _RUNTIME = 1, 2, 0, 0, 1
_CONTEXT_MEMORY = 4096

#: Types of plugin tensors that mean nothing to TensorRT but their bytes. Its headers exclude bool and uint8; int8 and FP8 may need scales,
#: or a GPU.
_PLAIN_TYPES = (FLOAT, HALF, BF16, INT32, INT64)


@dataclass
class PluginLayer:
    """A plugin in an engine: key and fields are what an engine file has of it."""

    key: tuple[bytes, ...]
    fields: dict[str, Field]
    inputs: list[str | None]
    outputs: list[str | None]
    tensors: list[Typed]


@dataclass
class Plan:
    """What a serialised engine has."""

    inputs: list[str]
    tensors: dict[str, tuple[Shape, int]]
    profiles: list[dict[str, list[Shape]]]
    aliases: dict[str, str]
    plugins: list[PluginLayer] = field(default_factory=list)
    libraries: tuple[Path, ...] = ()


class StandIn:
    """TensorRT over the stub library.

    Parameters
    ----------
    trt : module
        The bindings.
    stub : CDLL
        The library that they call.

    Attributes
    ----------
    networks, configs, enqueues : list
        What was made, and the execution contexts that were enqueued.
    creators : dict
        The plugin creators that are registered, by name, version and namespace.
    plans : dict
        What was built, by its bytes.
    """

    def __init__(self, trt: Any, stub: Any) -> None:
        def set_global(name: str, address: int) -> None:
            c_void_p.in_dll(stub, name).value = address
            addresses[name] = address

        addresses: dict[str, int] = {}

        self.places: Places = find_places(trt, set_global)
        self.networks: list[Network] = []
        self.configs: list[Config] = []
        self.enqueues: list[Context] = []
        self.creators: dict[tuple[bytes, ...], Creator] = {}
        self.keeps_creators = False  # as those of other libraries
        self.plans: dict[bytes, Plan] = {}
        self.reports_plugin_alias: bytes | None = None  # as a release that answers with an empty string would
        set_global("bindings_builder", keep(Builder(self)).address)
        set_global("bindings_runtime", keep(Runtime(self)).address)
        take_over(addresses["bindings_registry"], Registry(self))  # the bindings ask for the registry once only


class _Made(CppObject):
    """Something of the stand-in; ``interface`` is its class in the headers."""

    interface: str

    def __init__(self, whole: StandIn) -> None:
        self.whole = whole
        super().__init__(whole.places[self.interface])


class Registry(_Made):
    """``IPluginRegistry``."""

    interface = "IPluginRegistry"

    @function(c_bool, c_void_p, c_char_p)
    def registerCreator(self, address: int, namespace: bytes) -> bool:
        creator = Creator(address)
        known = creator.key in self.whole.creators
        self.whole.creators.setdefault(creator.key, creator)
        return not known

    @function(c_bool, c_void_p)
    def deregisterCreator(self, address: int) -> bool:
        return not self.whole.keeps_creators and self.whole.creators.pop(Creator(address).key, None) is not None

    @function(c_void_p, c_char_p)
    def loadLibrary(self, path: bytes) -> int | None:
        """Register the creators of a library; none of them if one is registered."""
        found = creators_in(Path(path.decode()))
        if found.keys() & self.whole.creators.keys():
            return None
        self.whole.creators |= found
        return 0x1000

    @function(c_void_p, c_char_p, c_char_p, c_char_p)
    def getCreator(self, name: bytes, version: bytes, namespace: bytes) -> int | None:
        creator = self.whole.creators.get((name, version, namespace))
        return creator.address if creator else None


def creators_in(library: Path) -> dict[tuple[bytes, ...], Creator]:
    """Return the creators of a plugin library, by name, version and namespace."""
    count = c_int32()
    get = ctypes.CDLL(str(library)).getCreators
    get.restype = POINTER(c_void_p)
    found = get(ctypes.byref(count))
    creators = [Creator(address) for address in found[: count.value]]
    return {creator.key: creator for creator in creators}


class Builder(_Made):
    """``IBuilder``."""

    interface = "IBuilder"

    @function(c_void_p, c_int32)
    def createNetworkV2(self, flags: int) -> CppObject:
        self.whole.networks.append(Network(self.whole.places))
        return self.whole.networks[-1]

    @function(c_void_p)
    def createBuilderConfig(self) -> CppObject:
        self.whole.configs.append(Config(self.whole))
        return self.whole.configs[-1]

    @function(c_void_p)
    def createOptimizationProfile(self) -> CppObject:
        return keep(Profile(self.whole))  # type: ignore[no-any-return]

    @function(c_void_p, c_void_p, c_void_p)
    def buildSerializedNetwork(self, network: int, config: int) -> CppObject | None:
        defined, options = object_at(network), object_at(config)
        if not in_a_thread(options.report_progress):
            return None
        plan = Plan(
            [one.name for one in defined.inputs], defined.tensors(), options.profiles, _aliases(defined), libraries=options.libraries
        )
        for layer, plugin in defined.plugins:
            made = in_a_thread(lambda: _build_plugin(layer, plugin))  # noqa: B023
            if made is None:
                return None
            plan.plugins.append(made)
        blob = f"plan {len(self.whole.plans)}".encode()
        self.whole.plans[blob] = plan
        return keep(HostMemory(self.whole, blob))  # type: ignore[no-any-return]


def _aliases(network: Network) -> dict[str, str]:
    """Return the aliases of KVCacheUpdate layers: output to input."""
    updates = [layer for layer in network.layers if layer.values.kind == "kv_cache_update"]
    return {layer.outputs[0].name: layer.values.inputs[0].name for layer in updates}


def _build_plugin(layer: Any, plugin: Plugin) -> PluginLayer | None:
    """Do what a build does with a plugin layer, on clones as TensorRT does; None where the plugin refuses."""
    inputs, outputs = layer.values.inputs, layer.outputs
    tensors = [(one.shape, one.type) for one in (*inputs, *outputs)]
    assert all(kind in _PLAIN_TYPES for _, kind in tensors), f"plugin tensors {tensors}"
    tried = plugin.clone()
    formats = all(tried.supports(position, tensors, len(inputs)) for position in range(len(tensors)))
    if not formats or not tried.configure(tensors, len(inputs)):
        tried.destroy()
        return None
    aliases = tried.aliased_inputs()
    assert aliases == [-1, 3, 5][: len(outputs)]
    assert all(tensors[len(inputs) + output] == tensors[alias] for output, alias in enumerate(aliases) if alias >= 0)
    assert tried.workspace_nbytes(tensors, len(inputs)) > 0
    stored = tried.serialized()
    key = tried.key()
    tried.destroy()
    assert stored is not None, "get_fields_to_serialize returned nothing that C++ can read"
    return PluginLayer(key, stored, [one.name for one in inputs], [one.name for one in outputs], tensors)


class Config(_Made):
    """``IBuilderConfig``."""

    interface = "IBuilderConfig"

    def __init__(self, whole: StandIn) -> None:
        self.profiles: list[dict[str, list[Shape]]] = []
        self.cleared: list[int] = []
        self.features: dict[int, bool] = {}
        self.monitor: int | None = None
        self.libraries: tuple[Path, ...] = ()
        super().__init__(whole)

    def report_progress(self) -> bool:
        """Call the progress monitor: two phases, one in the other. Return whether the build should go on."""
        if self.monitor is None:
            return True
        outer, inner = c_char_p(b"build"), c_char_p(b"tactics")
        call(self.monitor, 4, None, outer, c_char_p(None), c_int32(2))
        call(self.monitor, 4, None, inner, outer, c_int32(1))
        goes_on = call(self.monitor, 5, c_bool, inner, c_int32(0)) and call(self.monitor, 5, c_bool, outer, c_int32(0))
        call(self.monitor, 6, None, inner)
        goes_on = goes_on and call(self.monitor, 5, c_bool, outer, c_int32(1))
        call(self.monitor, 6, None, outer)
        return bool(goes_on)

    @function(c_int32, c_void_p)
    def addOptimizationProfile(self, profile: int) -> int:
        self.profiles.append(object_at(profile).shapes)
        return len(self.profiles) - 1

    @function(None, c_int32)
    def clearFlag(self, flag: int) -> None:
        self.cleared.append(flag)

    @function(None, c_int32, c_bool)
    def setPreviewFeature(self, feature: int, enabled: bool) -> None:
        self.features[feature] = enabled

    @function(None, POINTER(c_char_p), c_int32)
    def setPluginsToSerialize(self, paths: Any, count: int) -> None:
        self.libraries = tuple(Path(path.decode()) for path in paths[:count])

    @function(None, c_void_p)
    def setProgressMonitor(self, monitor: int | None) -> None:
        self.monitor = monitor


class Profile(_Made):
    """``IOptimizationProfile``."""

    interface = "IOptimizationProfile"

    def __init__(self, whole: StandIn) -> None:
        self.shapes: dict[str, list[Shape]] = {}  # smallest, optimal, largest
        super().__init__(whole)

    @function(c_bool, c_char_p, c_int32, POINTER(Dims))
    def setDimensions(self, name: bytes, selector: int, dims: Any) -> bool:
        self.shapes.setdefault(name.decode(), [(), (), ()])[selector] = dims.contents.shape
        return True

    @function(c_bool)
    def isValid(self) -> bool:
        return all(() not in shapes for shapes in self.shapes.values())


class HostMemory(_Made):
    """``IHostMemory``."""

    interface = "IHostMemory"

    def __init__(self, whole: StandIn, content: bytes) -> None:
        self.content = ctypes.create_string_buffer(content, len(content))
        super().__init__(whole)

    @function(c_void_p)
    def data(self) -> int:
        return ctypes.addressof(self.content)

    @function(c_size_t)
    def size(self) -> int:
        return len(self.content)

    @function(c_int32)
    def type(self) -> int:
        return 2  # kINT8


class Runtime(_Made):
    """``IRuntime``."""

    interface = "IRuntime"
    runs_host_code = False

    @function(None, c_bool)
    def setEngineHostCodeAllowed(self, allowed: bool) -> None:
        self.runs_host_code = allowed

    @function(c_void_p, c_void_p, c_size_t)
    def deserializeCudaEngine(self, blob: int, size: int) -> CppObject | None:
        plan = self.whole.plans.get(ctypes.string_at(blob, size).rstrip(b"\0"))
        if plan is None:
            return None
        if plan.libraries and not self.runs_host_code:
            return None
        plugins, creators = [], dict(self.whole.creators)
        for path in plan.libraries:
            creators |= creators_in(path)
        for layer in plan.plugins:
            creator = creators.get(layer.key)
            made = creator.create(fields(layer.fields), _RUNTIME) if creator else None
            if made is None:
                return None
            plugins.append(made)
        return keep(Engine(self.whole, plan, plugins))  # type: ignore[no-any-return]


class Engine(_Made):
    """``ICudaEngine``."""

    interface = "ICudaEngine"

    def __init__(self, whole: StandIn, plan: Plan, plugins: list[Plugin]) -> None:
        self.plan, self.plugins = plan, plugins
        super().__init__(whole)

    def destroyed(self) -> None:
        for plugin in self.plugins:
            plugin.destroy()
        self.plugins.clear()

    @function(c_int32)
    def getNbIOTensors(self) -> int:
        return len(self.plan.tensors)

    @function(c_void_p, c_int32)
    def getIOTensorName(self, index: int) -> bytes:
        return [*self.plan.tensors][index].encode()

    @function(c_int32)
    def getNbOptimizationProfiles(self) -> int:
        return len(self.plan.profiles)

    @function(c_int32, c_char_p)
    def getTensorLocation(self, name: bytes) -> int:
        return _DEVICE

    @function(c_int32, c_char_p)
    def getTensorIOMode(self, name: bytes) -> int:
        return _INPUT if name.decode() in self.plan.inputs else _OUTPUT

    @function(c_int32, c_char_p)
    def getTensorDataType(self, name: bytes) -> int:
        return self.plan.tensors[name.decode()][1]

    @function(Dims, c_char_p)
    def getTensorShape(self, name: bytes) -> Shape:
        return self.plan.tensors[name.decode()][0]

    @function(Dims, c_char_p, c_int32, c_int32)
    def getProfileShape(self, name: bytes, profile: int, selector: int) -> Shape:
        return self.plan.profiles[profile][name.decode()][selector]

    @function(c_int64, c_int32)
    def getDeviceMemorySizeForProfileV2(self, profile: int) -> int:
        return _CONTEXT_MEMORY

    @function(c_void_p, c_char_p)
    def getAliasedInputTensor(self, name: bytes) -> bytes | None:
        """Return what a KVCacheUpdate layer shares; TensorRT does not report what plugins do."""
        alias = self.plan.aliases.get(name.decode())
        return alias.encode() if alias else self.whole.reports_plugin_alias

    @function(c_void_p, c_int32)
    def createExecutionContext(self, strategy: int) -> CppObject:
        return keep(Context(self))  # type: ignore[no-any-return]


class Context(_Made):
    """``IExecutionContext``."""

    interface = "IExecutionContext"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.plugins = [plugin.attach() for plugin in engine.plugins]
        self.profile, self.memory = 0, (0, 0)
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.enqueued: Callable[[], bool] = self._enqueue_plugins
        self.stream = 0
        super().__init__(engine.whole)

    def destroyed(self) -> None:
        for plugin in self.plugins:
            plugin.destroy()
        self.plugins.clear()

    @function(c_bool, c_int32, c_void_p)
    def setOptimizationProfileAsync(self, profile: int, stream: int) -> bool:
        self.profile, self.shapes = profile, {}
        return True

    @function(None, c_void_p, c_int64)
    def setDeviceMemoryV2(self, address: int, nbytes: int) -> None:
        self.memory = (address, nbytes)

    @function(c_bool, c_char_p, c_void_p)
    def setTensorAddress(self, name: bytes, address: int) -> bool:
        self.addresses[name.decode()] = address
        return True

    @function(c_bool, c_char_p, POINTER(Dims))
    def setInputShape(self, name: bytes, dims: Any) -> bool:
        self.shapes[name.decode()] = dims.contents.shape
        return True

    @function(Dims, c_char_p)
    def getTensorShape(self, name: bytes) -> Shape:
        return self._shape(name.decode())

    def _shape(self, name: str) -> Shape:
        if name in self.shapes:
            return self.shapes[name]
        batch = self.shapes["input_ids"][0]  # the only free size of an output
        return tuple(batch if size < 0 else size for size in self.engine.plan.tensors[name][0])

    @function(c_bool, c_void_p)
    def enqueueV3(self, stream: int) -> bool:
        self.stream = stream
        self.whole.enqueues.append(self)
        return self.enqueued()

    def _enqueue_plugins(self) -> bool:
        """Enqueue each plugin with the addresses of the engine's tensors; what lies inside of the engine has made up addresses."""
        batch, width = self.shapes["input_ids"]
        for plugin, layer in zip(self.plugins, self.engine.plan.plugins, strict=True):
            tensors = [(_concrete(shape, batch, width), kind) for shape, kind in layer.tensors]
            ins, outs = ([self.addresses.get(name, 0x1000) for name in names] for names in (layer.inputs, layer.outputs))  # type: ignore[arg-type]
            if not plugin.on_shape_change(tensors, len(ins)) or not plugin.set_tactic(0):
                return False
            if not plugin.enqueue(tensors, ins, outs, self.memory[0], self.stream):
                return False
        return True


def _concrete(shape: Shape, batch: int, width: int) -> Shape:
    """Return a shape with its free sizes: the batch, and the new tokens of a slot."""
    return tuple((batch, width)[min(axis, 1)] if size < 0 else size for axis, size in enumerate(shape))
