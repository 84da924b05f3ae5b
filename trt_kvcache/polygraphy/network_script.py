"""``NetworkScript``: a decoder as a Polygraphy network script (``polygraphy convert SCRIPT.py --model-type trt-network-script``).

A script creates one at its top level and gives its two methods the names that Polygraphy looks for; see ``engines/``.
"""

import os
from pathlib import Path
from typing import Any

from polygraphy import config as polygraphy_config

from trt_kvcache.builder.definition import DecoderDefinition, define_decoder
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.serialization import make_config
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.module import TensorRT, load

#: TensorRT points at the weights until the build is done, but Polygraphy keeps builder and network only. So everything that was
#: defined is kept for the life of the process.
_DEFINED: list[tuple[Checkpoint, DecoderDefinition]] = []


class NetworkScript:
    """Makes the network of a Hugging Face folder for Polygraphy's tools.

    Parameters
    ----------
    model : path
        The folder. It is read when the network is asked for.
    max_batch_size, max_sequence_length, max_prefill_length, dtype, attention
        See :class:`~trt_kvcache.builder.options.BuildOptions`.

    Raises
    ------
    ConfigError
        The options cannot be served.

    Notes
    -----
    The TensorRT that Polygraphy uses is taken: TensorRT for RTX under ``POLYGRAPHY_USE_TENSORRT_RTX=1``, else full TensorRT.

    Examples
    --------
    A network script, as in ``engines/tiny_llama.py``:

    >>> script = NetworkScript("examples/tiny-llama", max_batch_size=4, max_sequence_length=256, max_prefill_length=64)
    >>> load_network, load_config = script.load_network, script.load_config
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_batch_size: int,
        max_sequence_length: int,
        max_prefill_length: int,
        dtype: str | None = None,
        attention: str = "native",
    ) -> None:
        self.model = Path(model)
        self.options = BuildOptions(
            max_batch_size=max_batch_size,
            max_sequence_length=max_sequence_length,
            max_prefill_length=max_prefill_length,
            dtype=dtype,
            attention=attention,
        )

    def load_network(self) -> tuple[Any, Any]:
        """Make the network: what Polygraphy calls with ``--model-type trt-network-script``.

        Returns
        -------
        builder : IBuilder
        network : INetworkDefinition

        Raises
        ------
        ConfigError, CheckpointError, BuildError
            The checkpoint cannot be read, or cannot be built with these options.
        """
        tensorrt = _polygraphys_tensorrt()
        self.options.check_tensorrt(tensorrt)
        checkpoint = Checkpoint.open(self.model)
        with tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
            definition = define_decoder(checkpoint, self.options, tensorrt, messages)
        _DEFINED.append((checkpoint, definition))
        return definition.builder, definition.network

    def load_config(self, builder: Any, network: Any) -> Any:
        """Make the builder configuration of a network: what Polygraphy calls with ``--trt-config-script``.

        Parameters
        ----------
        builder : IBuilder
        network : INetworkDefinition
            What :meth:`load_network` of a network script returned in this process.

        Returns
        -------
        IBuilderConfig

        Raises
        ------
        BuildError
            The network was not made by a network script, or TensorRT refused a profile.
        """
        definition = next((made for _, made in _DEFINED if made.network is network), None)
        if definition is None:
            raise BuildError(
                "load_config: expected the network that load_network of a NetworkScript returned. Use both functions of one script."
            )
        tensorrt = _polygraphys_tensorrt()
        with tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
            return make_config(definition, self.options, tensorrt, messages)


def _polygraphys_tensorrt() -> TensorRT:
    """Return the TensorRT that Polygraphy uses. Raises BuildError where it is not there."""
    if polygraphy_config.USE_TENSORRT_RTX:
        return load("tensorrt_rtx", error=BuildError)
    try:
        return load("tensorrt", error=BuildError)
    except BuildError as error:
        raise BuildError(f"{error} Set POLYGRAPHY_USE_TENSORRT_RTX=1 to build with TensorRT for RTX.") from None
