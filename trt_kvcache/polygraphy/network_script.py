"""``NetworkScript``: a decoder as a Polygraphy network script (``polygraphy convert SCRIPT.py --model-type trt-network-script``).

A script creates one at its top level and assigns its two methods to the names that Polygraphy looks for; see ``engines/``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polygraphy import config as polygraphy_config

from trt_kvcache._util.checks import one_of
from trt_kvcache.builder.checked_build import CheckedBuild, checked_build
from trt_kvcache.builder.definition import DecoderDefinition, define_decoder
from trt_kvcache.builder.options import BuildKeywords, BuildOptions, takes_build_options
from trt_kvcache.builder.serialization import make_config
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.module import TensorRT, load

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Defined(NamedTuple):
    """A network, with the open checkpoint that its weights are read from."""

    build: CheckedBuild
    definition: DecoderDefinition


#: TensorRT holds pointers to the weights until the build is done, but Polygraphy keeps only builder and network. So all definitions are
#: kept for the life of the process.
_DEFINED: list[_Defined] = []


@takes_build_options
class NetworkScript:
    """Defines the network of a Hugging Face folder for Polygraphy's tools.

    Parameters
    ----------
    model : path
        The folder. It is read when Polygraphy loads the network.
    **options
        Fields of :class:`~trt_kvcache.builder.options.BuildOptions`.

    Raises
    ------
    ConfigError
        An option has an unsupported value.

    Notes
    -----
    It uses the same TensorRT as Polygraphy: TensorRT for RTX if ``POLYGRAPHY_USE_TENSORRT_RTX=1`` is set, otherwise full TensorRT. No
    engine folder is written, so ``embed_weights`` has no effect.

    Examples
    --------
    A network script, as in ``engines/tiny_llama.py``:

    >>> from trt_kvcache import NetworkScript
    >>> script = NetworkScript("examples/tiny-llama", max_batch_size=4, max_sequence_length=256, max_prefill_length=64)
    >>> load_network, load_config = script.load_network, script.load_config
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[BuildKeywords]) -> None:
        self.model = Path(model)
        self.options = BuildOptions.of(options)

    def load_network(self) -> tuple[Any, Any]:
        """Define the network. Polygraphy calls it with ``--model-type trt-network-script``.

        Returns
        -------
        builder : IBuilder
            The builder that owns the network.
        network : INetworkDefinition
            The decoder.

        Raises
        ------
        ConfigError
            The checkpoint cannot be built with these options.
        CheckpointError
            The folder is incomplete, damaged, or holds a model that is not supported.
        BuildError
            TensorRT is not installed, lacks a layer that the options need, or rejects the network.
        """
        tensorrt = _polygraphys_tensorrt()
        one_of("flavour", self.options.flavour, ("auto", tensorrt.flavour))
        build = checked_build(self.model, None, replace(self.options, flavour=tensorrt.flavour))
        with tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
            definition = define_decoder(build.checkpoint, build.options, build.cache, tensorrt, messages, tensors=build.tensors)
        self.options = build.options
        _DEFINED.append(_Defined(build, definition))
        return definition.builder, definition.network

    def load_config(self, builder: Any, network: Any) -> Any:
        """Create the builder configuration of a network. Polygraphy calls it with ``--trt-config-script``.

        Parameters
        ----------
        builder : IBuilder
            Not used: the configuration belongs to the builder of the network.
        network : INetworkDefinition
            A network that :meth:`load_network` of a network script returned in this process.

        Returns
        -------
        IBuilderConfig
            With the optimization profiles of the network.

        Raises
        ------
        BuildError
            The network was not made by a network script, or TensorRT rejected a profile.
        """
        defined = next((one for one in _DEFINED if one.definition.network is network), None)
        if defined is None:
            raise BuildError(
                "load_config: expected the network that load_network of a NetworkScript returned. Use both functions of one script."
            )
        tensorrt = _polygraphys_tensorrt()
        with tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
            return make_config(defined.definition, defined.build.options, tensorrt, messages)


def _polygraphys_tensorrt() -> TensorRT:
    """Return the TensorRT that Polygraphy uses, or raise a BuildError if it is not installed."""
    if polygraphy_config.USE_TENSORRT_RTX:
        return load("tensorrt_rtx", error=BuildError)
    try:
        return load("tensorrt", error=BuildError)
    except BuildError as error:
        raise BuildError(f"{error} Set POLYGRAPHY_USE_TENSORRT_RTX=1 to build with TensorRT for RTX.") from None
