"""Input of an EAGLE-3 head: hidden states of several layers of the model of which it is the head, and the embedding of a token.

With ``e`` for the embedding of the next token, ``s`` for the hidden states of a token before some layers of the model, and ``n`` for
norms::

    x = fc(concatenate(s))                              # in the step of the model; in a draft, the head's output before its final norm
    x = x + attention(concatenate(n_e(e), n_x(x)))      # or n_x(x) + ..., with adds_normalised
"""

from __future__ import annotations

from dataclasses import dataclass

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION, MAX_LAYERS
from trt_kvcache.model.norm_config import NormConfig

#: Hidden states of a token that the head reads, unless ``config.json`` names the layers.
NUM_STATES = 3


@dataclass(frozen=True, kw_only=True)
class Eagle3InputConfig:
    """Input of an EAGLE-3 head.

    Parameters
    ----------
    norm : NormConfig
        Norm of the embedding, and of the reduced hidden states; each has a weight of its own.
    state_size : int
        Width of the residual stream of the model of which it is the head.
    num_logits : int
        Rows of the head: token ids that it can propose.
    state_layers : tuple of int or None
        The head reads the residual stream before each of these layers of the model, by index; the number of layers stands for the end.
        None for those of a model of n layers: 2, n // 2 and n - 3.
    adds_normalised : bool
        True if the output of attention is added to the normalised hidden state.
    shares_embedding, shares_head : bool
        True if embedding and head are those of the model, and not in the files of this head.

    Raises
    ------
    ConfigError
        A number is out of range, or there are no layers.
    """

    norm: NormConfig
    state_size: int
    num_logits: int
    state_layers: tuple[int, ...] | None = None
    adds_normalised: bool = False
    shares_embedding: bool = False
    shares_head: bool = False

    def __post_init__(self) -> None:
        for name in ("state_size", "num_logits"):
            int_in_range(f"Eagle3InputConfig.{name}", getattr(self, name), 1, MAX_DIMENSION, error=ConfigError)
        if self.state_layers is not None:
            int_in_range("Eagle3InputConfig: number of state_layers", len(self.state_layers), 1, MAX_LAYERS, error=ConfigError)
            for layer in self.state_layers:
                int_in_range("Eagle3InputConfig.state_layers", layer, 0, MAX_LAYERS, error=ConfigError)

    @property
    def states_width(self) -> int:
        """Width of the concatenated hidden states of a token."""
        return self.state_size * (NUM_STATES if self.state_layers is None else len(self.state_layers))

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers before which the head reads the residual stream of a model.

        Parameters
        ----------
        num_layers : int
            Layers of the model.

        Returns
        -------
        tuple of int
            Indices from 0 to ``num_layers``, in the order in which the head reads them.

        Raises
        ------
        ConfigError
            The model has fewer layers.
        """
        layers = (2, num_layers // 2, num_layers - 3) if self.state_layers is None else self.state_layers
        if not all(0 <= layer <= num_layers for layer in layers):
            found = ", ".join(map(str, layers))
            raise ConfigError(f"draft: expected an EAGLE-3 head that reads layers from 0 to {num_layers} of the model, got one of {found}.")
        return layers
