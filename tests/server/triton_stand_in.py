"""What ``triton_python_backend_utils`` gives to models, by its documentation: the server of Triton is no package that could be installed.

Unlike the real one it raises wherever a model breaks a rule: a message behind the final one or one without a response and without the
final flag, an output of another name, type or shape than the configuration has, an input that is read when ``execute`` has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

FINAL = 1
_DTYPES = {"TYPE_INT32": np.dtype(np.int32), "TYPE_STRING": np.dtype(np.object_)}


class TritonError:
    """An error with a code."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        assert isinstance(message, str)
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """An array with a name."""

    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        assert isinstance(array, np.ndarray)
        self._name, self._array, self.released = name, array, False

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        assert not self.released, "the inputs of a request are gone when execute has returned"
        return self._array


class InferenceResponse:
    """Outputs, or an error."""

    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Sender:
    """Takes the responses to one request, from any thread."""

    def __init__(self, outputs: Mapping[str, Mapping[str, Any]]) -> None:
        self.responses: list[InferenceResponse] = []
        self.closed = threading.Event()
        self.cancelled = False
        self._outputs = outputs

    def is_cancelled(self) -> bool:
        return self.cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert flags in (0, FINAL), "Unsupported flag"
        assert response is not None or flags, "a response must be given where the flags are zero"
        assert not self.closed.is_set(), "the sender has been closed"
        if response is not None:
            if response.error is None:
                assert response.tensors.keys() == self._outputs.keys()
                for name, array in response.tensors.items():
                    assert array.dtype == _DTYPES[self._outputs[name]["data_type"]]
                    assert array.ndim == 1
                    assert self._outputs[name]["dims"] in (["-1"], [str(array.size)])
            self.responses.append(response)
        if flags:
            self.closed.set()


class InferenceRequest:
    """Inputs, and where the answer goes."""

    def __init__(self, inputs: Mapping[str, np.ndarray[Any, Any]], sender: Sender) -> None:
        self.inputs = {name: Tensor(name, array) for name, array in inputs.items()}
        self.sender = sender

    def get_response_sender(self) -> Sender:
        return self.sender


def _input(request: InferenceRequest, name: str) -> Tensor | None:
    return request.inputs.get(name)


def utils() -> ModuleType:
    """Return the module."""
    module = ModuleType("triton_python_backend_utils")
    members = {one.__name__: one for one in (InferenceRequest, InferenceResponse, Tensor, TritonError)}
    vars(module).update(members, TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL, get_input_tensor_by_name=_input)
    return module


class Instance:
    """An instance of a model, as the server runs it."""

    def __init__(self, model: Any, config: Mapping[str, Any], arguments: Mapping[str, str]) -> None:
        self._model = model
        self._outputs = {output["name"]: output for output in config["output"]}
        self._inputs = {one["name"]: one for one in config["input"]}
        assert config["model_transaction_policy"]["decoupled"]
        model.initialize(dict(arguments))

    def request(self, **inputs: np.ndarray[Any, Any]) -> Sender:
        """Send one request."""
        assert inputs.keys() <= self._inputs.keys()
        assert all(array.dtype == _DTYPES[self._inputs[name]["data_type"]] for name, array in inputs.items())
        assert all(self._inputs[name].get("optional") for name in self._inputs.keys() - inputs.keys())
        request = InferenceRequest(inputs, Sender(self._outputs))
        assert self._model.execute([request]) is None, "a decoupled model returns nothing"
        for tensor in request.inputs.values():
            tensor.released = True
        return request.sender

    def end(self) -> None:
        """Unload it."""
        self._model.finalize()
