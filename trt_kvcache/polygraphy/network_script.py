"""``NetworkScript``: a decoder as a Polygraphy network script (``polygraphy convert SCRIPT.py --model-type trt-network-script``).

A script creates one at its top level and assigns its two methods to the names that Polygraphy looks for; see ``engines/``.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from polygraphy import config as polygraphy_config

from trt_kvcache.builder.code_types import for_codes
from trt_kvcache.builder.definition import DecoderDefinition, define_decoder
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.serialization import make_config
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.attention_variants import default_attention
from trt_kvcache.errors import BuildError
from trt_kvcache.trt.module import TensorRT, load

#: TensorRT holds pointers to the weights until the build is done, but Polygraphy keeps only builder and network. So all definitions are
#: kept for the life of the process.
_DEFINED: list[tuple[Checkpoint, DecoderDefinition]] = []


class NetworkScript:
    """Defines the network of a Hugging Face folder for Polygraphy's tools.

    Parameters
    ----------
    model : path
        The folder. It is read when Polygraphy loads the network.
    max_batch_size : int
        Slots of the cache.
    max_sequence_length : int
        Tokens that a slot can hold.
    max_prefill_length : int
        Most new tokens per slot in one enqueue.
    max_logits_per_slot : int or "all"
        Most new tokens per slot whose logits one enqueue returns.
    dtype : {"float16", "bfloat16", "float32"}, optional
        Dtype of computation and cache; by default the checkpoint's.
    attention : {"native", "mask", "plugin"}, optional
        TensorRT's attention with lengths, with an explicit mask, or the attention of our plugin. See
        :class:`~trt_kvcache.builder.options.BuildOptions`. Chosen as by ``build_engine`` if left out, when the network is defined.

    Raises
    ------
    ConfigError
        An option has an unsupported value.
    RangeError
        A size is out of range.

    Notes
    -----
    It uses the same TensorRT as Polygraphy: TensorRT for RTX if ``POLYGRAPHY_USE_TENSORRT_RTX=1`` is set, otherwise full TensorRT.

    Examples
    --------
    A network script, as in ``engines/tiny_llama.py``:

    >>> from trt_kvcache import NetworkScript
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
        max_logits_per_slot: int | Literal["all"] = 1,
        dtype: str | None = None,
        attention: str | None = None,
    ) -> None:
        self.model = Path(model)
        self.options = BuildOptions(
            max_batch_size=max_batch_size,
            max_sequence_length=max_sequence_length,
            max_prefill_length=max_prefill_length,
            max_logits_per_slot=max_logits_per_slot,
            dtype=dtype,
            attention=attention or "native",
        )
        self._chooses_attention = attention is None

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
        checkpoint = Checkpoint.open(self.model)
        if self._chooses_attention:
            attention = default_attention(checkpoint.config, self.options.max_sequence_length)
            self.options = replace(self.options, attention=attention)
        self.options = for_codes(self.options, checkpoint.code_kinds, tensorrt)
        self.options.check_tensorrt(tensorrt)
        with tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
            definition = define_decoder(checkpoint, self.options, tensorrt, messages)
        _DEFINED.append((checkpoint, definition))
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
        definition = next((made for _, made in _DEFINED if made.network is network), None)
        if definition is None:
            raise BuildError(
                "load_config: expected the network that load_network of a NetworkScript returned. Use both functions of one script."
            )
        tensorrt = _polygraphys_tensorrt()
        with tensorrt.log.collect(ignore_missing_driver=tensorrt.is_rtx) as messages:
            return make_config(definition, self.options, tensorrt, messages)


def _polygraphys_tensorrt() -> TensorRT:
    """Return the TensorRT that Polygraphy uses, or raise a BuildError if it is not installed."""
    if polygraphy_config.USE_TENSORRT_RTX:
        return load("tensorrt_rtx", error=BuildError)
    try:
        return load("tensorrt", error=BuildError)
    except BuildError as error:
        raise BuildError(f"{error} Set POLYGRAPHY_USE_TENSORRT_RTX=1 to build with TensorRT for RTX.") from None
