"""``NetworkScript``: a decoder as a Polygraphy network script (``polygraphy convert SCRIPT.py --model-type trt-network-script``).

A script makes one at its top level and names its two methods; see ``engines/``.
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

#: TensorRT points at the weights until the build is done, and Polygraphy lets go of everything but builder and network. So
#: what was defined stays for the life of the process.
_DEFINED: list[tuple[Checkpoint, DecoderDefinition]] = []


class NetworkScript:
    """Builds the network of a Hugging Face folder for Polygraphy's tools.

    Parameters
    ----------
    model : path
        The folder. Read when the network is asked for.
    max_batch_size, max_sequence_length, max_prefill_length, dtype, attention
        See :class:`~trt_kvcache.builder.options.BuildOptions`.

    Raises
    ------
    ConfigError
        The options cannot be served.

    Notes
    -----
    TensorRT is the one that Polygraphy uses: TensorRT for RTX under ``POLYGRAPHY_USE_TENSORRT_RTX=1``, else full TensorRT.
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
        """Return the builder and the network, as ``polygraphy ... --model-type trt-network-script`` wants them.

        Raises
        ------
        ConfigError, CheckpointError, BuildError
            The checkpoint cannot be read, or built with these options.
        """
        tensorrt = _polygraphys_tensorrt()
        self.options.check_tensorrt(tensorrt)
        checkpoint = Checkpoint.open(self.model)
        with tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
            definition = define_decoder(checkpoint, self.options, tensorrt, messages)
        _DEFINED.append((checkpoint, definition))
        return definition.builder, definition.network

    def load_config(self, builder: Any, network: Any) -> Any:
        """Return the builder configuration of a network of this process, as ``--trt-config-script`` wants it.

        Raises
        ------
        BuildError
            The network was not made by a recipe, or TensorRT refused a profile.
        """
        definition = next((made for _, made in _DEFINED if made.network is network), None)
        if definition is None:
            raise BuildError("load_config: expected the network that load_network of a recipe returned. Use both functions of one script.")
        tensorrt = _polygraphys_tensorrt()
        with tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
            return make_config(definition, self.options, tensorrt, messages)


def _polygraphys_tensorrt() -> TensorRT:
    if polygraphy_config.USE_TENSORRT_RTX:
        return load("tensorrt_rtx", error=BuildError)
    try:
        return load("tensorrt", error=BuildError)
    except BuildError as error:
        raise BuildError(f"{error} Set POLYGRAPHY_USE_TENSORRT_RTX=1 to build with TensorRT for RTX.") from None
