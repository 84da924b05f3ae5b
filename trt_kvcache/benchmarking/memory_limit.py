"""``MemoryLimit``: the memory bandwidth limit of decode steps, which read weights, K and V, and read and write states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trt_kvcache.benchmarking.cache_traffic import CacheTraffic
from trt_kvcache.benchmarking.cases import BenchmarkCase
from trt_kvcache.benchmarking.copy_speed import copy_bytes_per_second
from trt_kvcache.benchmarking.measure import BenchmarkRow
from trt_kvcache.checkpoint.weights_summary import WeightsSummary
from trt_kvcache.dtypes import itemsize
from trt_kvcache.memory.base import Memory
from trt_kvcache.model import ModelConfig, RoutedMlpConfig
from trt_kvcache.model.tensor_shapes import looked_up_tensors, tensor_shapes
from trt_kvcache.model.weight_parts import expert_tensors


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """Bytes that a decode step reads, and the memory bandwidth.

    Parameters
    ----------
    weights_nbytes : int
        Bytes of all weights.
    step_weights_nbytes : int
        Bytes of the weights that a decode step reads: without the embedding, of which it reads a few rows, unless the head is the same
        tensor.
    copy_bytes_per_second : float
        Speed of a plain copy in the memory where the model runs, bytes read plus bytes written.
    experts_nbytes : int
        Bytes of the experts among ``step_weights_nbytes``, of which each token needs ``experts_per_token`` of ``num_experts``.
    num_experts, experts_per_token : int
        Experts of a layer, and those of a token; 1 for a model without experts.

    Examples
    --------
    >>> from trt_kvcache.benchmarking import BenchmarkCase, CacheTraffic, MemoryLimit
    >>> limit = MemoryLimit(weights_nbytes=1_200, step_weights_nbytes=1_000, copy_bytes_per_second=1e6)
    >>> case = BenchmarkCase(generate_tokens=2, batch_size=4, depth=9)
    >>> traffic = CacheTraffic(rows=((10, None),), states_nbytes=0)
    >>> limit.generation_nbytes(case, traffic)  # twice the weights, and 4 slots of 11 and then of 12 tokens
    2920
    """

    weights_nbytes: int
    step_weights_nbytes: int
    copy_bytes_per_second: float
    experts_nbytes: int = 0
    num_experts: int = 1
    experts_per_token: int = 1

    @classmethod
    def measured(
        cls, model: ModelConfig, dtype: str, memory: Memory, weights: WeightsSummary | None = None, *, adapters_nbytes: int = 0
    ) -> MemoryLimit:
        """Return the limit for a model; measures the speed of a copy.

        Parameters
        ----------
        model : ModelConfig
            The shapes of its weights.
        dtype : str
            Dtype of the weights, as in :mod:`trt_kvcache.dtypes`.
        memory : Memory
            Memory of the model. The measured copy allocates in it, so call this after other measurements.
        weights : WeightsSummary, optional
            Stored formats of the weights. Quantized weights count with their packed bytes, also if the engine has dequantized them: the
            share then shows the loss.
        adapters_nbytes : int
            Bytes of the updates of adapters that a step reads next to the weights.

        Returns
        -------
        MemoryLimit
            Counted bytes, and the measured speed.
        """
        speed = copy_bytes_per_second(memory)
        if weights is not None and weights.is_quantized:
            sizes = (weights.nbytes + adapters_nbytes, weights.step_nbytes + adapters_nbytes, weights.experts_nbytes)
            return cls._of(model, *sizes, copy_bytes_per_second=speed)
        elements = {name: math.prod(shape) for name, shape in tensor_shapes(model).items()}
        total = sum(elements.values())
        unread = sum(elements[name] for name in looked_up_tensors(model))
        size = itemsize(dtype)
        experts = sum(elements[name] for name in expert_tensors(model))
        read = (total - unread) * size + adapters_nbytes
        return cls._of(model, total * size + adapters_nbytes, read, experts * size, copy_bytes_per_second=speed)

    @classmethod
    def _of(cls, model: ModelConfig, nbytes: int, step_nbytes: int, experts_nbytes: int, **options: Any) -> MemoryLimit:
        """Return the limit for weights of these sizes, with the first router of the model."""
        routers = [layer.mlp.router for layer in model.layers if isinstance(layer.mlp, RoutedMlpConfig)]
        choice = {"num_experts": routers[0].num_experts, "experts_per_token": routers[0].experts_per_token} if routers else {}
        return cls(weights_nbytes=nbytes, step_weights_nbytes=step_nbytes, experts_nbytes=experts_nbytes, **choice, **options)

    def step_nbytes(self, batch_size: int) -> int:
        """Return the bytes of the weights that a decode step reads.

        Parameters
        ----------
        batch_size : int
            Slots of the step, with one token each.

        Returns
        -------
        int
            ``step_weights_nbytes`` without experts that no token chooses, on average: each token chooses on its own.
        """
        unread = (1 - self.experts_per_token / self.num_experts) ** batch_size
        return self.step_weights_nbytes - round(self.experts_nbytes * unread)

    def generation_nbytes(self, case: BenchmarkCase, traffic: CacheTraffic) -> int:
        """Return the bytes that the decode steps of a case read and write.

        Parameters
        ----------
        case : BenchmarkCase
            With ``generate_tokens`` steps.
        traffic : CacheTraffic
            Bytes that a step needs of the cache of a slot.

        Returns
        -------
        int
            Bytes of the weights (:meth:`step_nbytes`) once per step, and the cache bytes of each slot in each step, with the new token.
        """
        steps, first = case.generate_tokens, case.depth + case.prompt_length + 1
        cache = sum(traffic.nbytes(tokens) for tokens in range(first, first + steps))
        return steps * self.step_nbytes(case.batch_size) + case.batch_size * cache

    def token_nbytes(self, row: BenchmarkRow) -> int | None:
        """Return the bytes that decode steps of a row read and write for each token, on average.

        Parameters
        ----------
        row : BenchmarkRow
            Measurements of a case.

        Returns
        -------
        int or None
            :meth:`generation_nbytes` over the tokens of all slots: slots that run together share the weights. None for a row without
            decode steps.
        """
        if row.generation_seconds is None:
            return None
        return self.generation_nbytes(row.case, row.cache_traffic) // (row.case.generate_tokens * row.case.batch_size)

    def share(self, row: BenchmarkRow) -> float | None:
        """Return the share of the limit: time to copy :meth:`generation_nbytes` divided by the time of the decode steps.

        Parameters
        ----------
        row : BenchmarkRow
            Measurements of a case.

        Returns
        -------
        float or None
            1 if decode steps are as fast as reading; None for a row without decode steps.
        """
        if row.generation_seconds is None:
            return None
        return self.generation_nbytes(row.case, row.cache_traffic) / self.copy_bytes_per_second / row.generation_seconds
