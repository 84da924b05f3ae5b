"""A model of Triton Inference Server's Python backend: streams of tokens from one session.

The parameters in ``config.pbtxt``: ``model`` is an engine folder or a Hugging Face folder, ``session`` the options of
``trt_kvcache.SessionSource`` as a JSON object, ``max_queue`` and ``max_seconds`` those of ``trt_kvcache.server.AsyncEngine``.
"""

import asyncio
import json
import threading
from contextlib import aclosing

import numpy as np
import triton_python_backend_utils as pb_utils

from trt_kvcache import SessionSource
from trt_kvcache.errors import CapacityError, ClosedError, QueueFullError
from trt_kvcache.server import AsyncEngine

#: Seconds between two looks at whether a client has gone away.
_PATIENCE = 0.05

#: What Triton calls an error; any other is an internal one.
_CODES = (
    (asyncio.CancelledError, pb_utils.TritonError.CANCELLED),
    ((QueueFullError, ClosedError, TimeoutError), pb_utils.TritonError.UNAVAILABLE),
    ((CapacityError, ValueError, TypeError), pb_utils.TritonError.INVALID_ARG),
)


class TritonPythonModel:
    """One engine in an event loop of its own; Triton's thread only passes requests on."""

    def initialize(self, args):
        """Open the session; Triton waits for it."""
        parameters = {name: one["string_value"] for name, one in json.loads(args["model_config"])["parameters"].items()}
        source = SessionSource(parameters["model"], **json.loads(parameters.get("session", "{}")))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trt_kvcache")
        self._thread.start()
        try:
            self._engine = AsyncEngine(
                source,
                model=args["model_name"],
                max_queue=int(parameters.get("max_queue", 64)),
                max_seconds=float(parameters.get("max_seconds", 600)),
            )
            self._run(self._engine.start())
        except BaseException:
            self._end_loop()
            raise

    def execute(self, requests):
        """Begin to answer requests, whose inputs are gone when this returns. The answers go to the senders of the requests."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                wanted = self._wanted(request)
            except Exception as error:  # noqa: BLE001 - the client gets it
                _end(sender, error)
            else:
                asyncio.run_coroutine_threadsafe(self._answer(wanted, sender), self._loop)

    def finalize(self):
        """Let answers that have begun end, then close the session."""
        self._run(self._engine.drain())
        self._run(self._engine.cleanup())
        self._end_loop()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end_loop(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, wanted, sender):
        """Send the parts of one answer. Whatever happens, the last message has the final flag."""
        answering = asyncio.ensure_future(self._send(wanted, sender))
        while not (await asyncio.wait([answering], timeout=_PATIENCE))[0]:
            if sender.is_cancelled():
                answering.cancel()
        _end(sender, asyncio.CancelledError("the client has gone away") if answering.cancelled() else answering.exception())

    async def _send(self, wanted, sender):
        async with aclosing(self._engine.generate(wanted)) as chunks:
            async for chunk in chunks:
                sender.send(
                    pb_utils.InferenceResponse(
                        [
                            pb_utils.Tensor("token_ids", np.array(chunk["token_ids"], np.int32)),
                            pb_utils.Tensor("text", np.array([chunk["text"].encode()], np.object_)),
                            pb_utils.Tensor("index", np.array([chunk["index"]], np.int32)),
                            pb_utils.Tensor("finish_reason", np.array([chunk.get("finish_reason", "").encode()], np.object_)),
                        ]
                    )
                )

    def _wanted(self, request):
        """Return the request to the engine."""
        tokens, text, options = (_value(request, name) for name in ("token_ids", "text", "options"))
        if (tokens is None) == (text is None):
            raise ValueError("input: expected token_ids or text.")
        wanted = {} if options is None else json.loads(options[0])
        if tokens is not None:
            return {**wanted, "token_ids": tokens.tolist()}
        if self._engine.tokenizer is None:
            raise ValueError("text: expected a model folder with tokenizer.json, got none. Send token_ids.")
        return {**wanted, "token_ids": self._engine.tokenizer.encode(text[0].decode())}


def _value(request, name):
    """Return an input, None if the request does not have it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)


def _end(sender, error):
    """Send the last message of an answer, with an error if there was one."""
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    if error is None:
        sender.send(flags=final)
        return
    code = next((code for kinds, code in _CODES if isinstance(error, kinds)), pb_utils.TritonError.INTERNAL)
    sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError(str(error), code)), flags=final)
