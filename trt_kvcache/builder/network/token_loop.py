"""A loop over the new tokens of a step, for what depends on the token before."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.sizes import size


class TokenLoop:
    """A loop of TensorRT with an iteration for each new token, those of padding included.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    name : str
        Prefix of the layers' names.
    tokens : ITensor [B, s, ...]
        Only its shape is read.

    Notes
    -----
    ``INetworkDefinition.add_loop``. The number of iterations is a size, which TensorRT knows on the host.
    """

    def __init__(self, graph: Graph, name: str, tokens: Any) -> None:
        self._graph, self._name, self._kinds = graph, name, graph.trt.LoopOutput
        width = graph.cast(f"{name}/width_int32", size(graph, f"{name}/width", tokens, 1), "int32")
        self._count = graph.shuffle(f"{name}/count", width, reshape=())
        self._loop = graph.network.add_loop()
        self._loop.add_trip_limit(self._count, graph.trt.TripLimit.COUNT).name = f"{name}/limit"

    def each(self, what: str, x: Any) -> Any:
        """Return what the token of an iteration has.

        Parameters
        ----------
        what : str
            Names the layer.
        x : ITensor [B, s, ...]
            Of all tokens.

        Returns
        -------
        ITensor [B, ...]
            In the loop.
        """
        layer = self._loop.add_iterator(x, 1, False)
        layer.name = f"{self._name}/each_{what}"
        return self._graph.result(layer)

    def recurrence(self, what: str, first: Any) -> Any:
        """Return the layer of a value that goes from token to token.

        Parameters
        ----------
        what : str
            Names the layer.
        first : ITensor
            The value before the first token.

        Returns
        -------
        IRecurrenceLayer
            ``Graph.result`` gives the value before a token; set its input 1 to that after it.
        """
        layer = self._loop.add_recurrence(first)
        layer.name = f"{self._name}/{what}"
        return layer

    def stacked(self, what: str, x: Any) -> Any:
        """Return what the iterations gave.

        Parameters
        ----------
        what : str
            Names the layer.
        x : ITensor [B, ...]
            Of one token, in the loop.

        Returns
        -------
        ITensor [B, s, ...]
            Of all tokens.
        """
        layer = self._loop.add_loop_output(x, self._kinds.CONCATENATE, 1)
        layer.name = f"{self._name}/all_{what}"
        layer.set_input(1, self._count)
        return self._graph.result(layer)

    def last(self, what: str, recurrence: Any) -> Any:
        """Return the value after the last token.

        Parameters
        ----------
        what : str
            Names the layer.
        recurrence : IRecurrenceLayer
            Of the value, with both inputs.

        Returns
        -------
        ITensor
            Outside the loop.
        """
        layer = self._loop.add_loop_output(recurrence.get_output(0), self._kinds.LAST_VALUE, 0)
        layer.name = f"{self._name}/last_{what}"
        return self._graph.result(layer)
