"""Input of an assistant: a hidden state of the model of which it is the assistant, the embedding of a token, and K and V of the model.

With ``e`` for the row of the next token in the embedding of the model, times its factor, and ``h`` for the output of the final norm of the
model, within a draft for the last state of the assistant::

    x = pre_projection(concatenate(e, h))
    x = norm(layers(x))                       # attention to K and V in the cache of the model, which has nothing of ``e`` yet
    h = post_projection(x)
"""

from __future__ import annotations

from dataclasses import dataclass

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model.layer_config import AttentionConfig


@dataclass(frozen=True, kw_only=True)
class TokenClusters:
    """Clusters of token ids by a centroid. Of a hidden state, only the tokens of the nearest clusters have logits.

    Parameters
    ----------
    count : int
        Clusters, all of the same number of tokens.
    chosen : int
        Clusters whose tokens have logits.

    Raises
    ------
    ConfigError
        A number is out of range.
    """

    count: int
    chosen: int

    def __post_init__(self) -> None:
        int_in_range("TokenClusters.count", self.count, 1, MAX_DIMENSION, error=ConfigError)
        int_in_range("TokenClusters.chosen", self.chosen, 1, self.count, error=ConfigError)


@dataclass(frozen=True, kw_only=True)
class AssistantInputConfig:
    """Input of an assistant.

    Parameters
    ----------
    state_size : int
        Width of the residual stream of the model of which it is the assistant.
    kv_layers : tuple of AttentionConfig
        Attention of the layers of the model whose K and V it reads, one with and one without a sliding window, or one of them. In layers of
        the assistant, ``kv_source_layer`` is an index of these.
    clusters : TokenClusters or None
        Clusters of the token ids. None for an assistant with logits of all tokens.

    Raises
    ------
    ConfigError
        A number is out of range, or there are no layers, or several with or without a window.
    """

    state_size: int
    kv_layers: tuple[AttentionConfig, ...]
    clusters: TokenClusters | None = None

    def __post_init__(self) -> None:
        int_in_range("AssistantInputConfig.state_size", self.state_size, 1, MAX_DIMENSION, error=ConfigError)
        windows = [mixer.window is not None for mixer in self.kv_layers]
        if sorted(set(windows)) != sorted(windows) or not windows:
            raise ConfigError(
                f"AssistantInputConfig.kv_layers: expected a layer with and one without a window, or one of them, got {len(windows)}."
            )

    def kv_places(self, layers: tuple[AttentionConfig, ...]) -> tuple[int, ...]:
        """Return the layers of the cache of a model whose K and V the assistant reads: the last ones with and without a window.

        Parameters
        ----------
        layers : tuple of AttentionConfig
            Attention of each layer of the cache.

        Returns
        -------
        tuple of int
            An index for each of ``kv_layers``.

        Raises
        ------
        ConfigError
            The model has no such layer, or its K and V have other sizes.
        """
        places = []
        for own in self.kv_layers:
            what = "full attention" if own.window is None else "sliding-window attention"
            found = [place for place, mixer in enumerate(layers) if (mixer.window is None) == (own.window is None)]
            if not found:
                raise ConfigError(f"draft: expected a model with {what}, whose K and V the assistant reads, got one without.")
            stored = layers[found[-1]]
            if (stored.num_kv_heads, stored.head_dim) != (own.num_kv_heads, own.head_dim):
                raise ConfigError(
                    f"draft: expected an assistant that reads {stored.num_kv_heads} heads of {stored.head_dim} in {what}, as the model "
                    f"has, got one that reads {own.num_kv_heads} of {own.head_dim}."
                )
            places.append(found[-1])
        return tuple(places)
