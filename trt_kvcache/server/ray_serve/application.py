"""The application: OpenAI's API in front, replicas of an engine behind it."""

import os
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.engine_folder.folder import is_engine_folder
from trt_kvcache.errors import ConfigError
from trt_kvcache.server.http import ServerOptions, make_app
from trt_kvcache.server.http.metrics import Metrics
from trt_kvcache.server.http.options import ProxyHeader
from trt_kvcache.server.ray_serve.prefix_router import PrefixRouter
from trt_kvcache.server.ray_serve.remote_engine import RemoteEngine
from trt_kvcache.server.ray_serve.replica import EngineReplica
from trt_kvcache.session.model_location import locate_model
from trt_kvcache.session.session_options import EngineChoice
from trt_kvcache.session.session_source import SessionSource

#: The environment variable with a key that clients must bring: that of the command ``serve``.
KEY_VARIABLE = "TRT_KVCACHE_API_KEY"

#: Slots of a model folder's sessions.
_SLOTS = 8

#: The API in front only passes on: the bounds are those of the engines.
_UNBOUNDED = 1 << 20


def make_application(
    source: SessionSource,
    *,
    model: str,
    replicas: int = 1,
    max_replicas: int | None = None,
    target_requests: float = 8,
    max_requests: int = 64,
    max_seconds: float | None = 600,
    options: ServerOptions | None = None,
    actor: dict[str, Any] | None = None,
    block_tokens: int = 16,
) -> Application:
    """Return an application for ``ray.serve.run``.

    A deployment with OpenAI's API makes token ids of prompts, and sends them to a deployment of engines. A prompt goes to the replica that
    was given its beginning before, unless that one has more to do than it saves: see
    :class:`~trt_kvcache.server.prefix_routing.PrefixRouting`.

    Parameters
    ----------
    source : SessionSource
        Opens the session of each replica. Its folder must be there on each machine.
    model : str
        The name that it is served under.
    replicas : int
        Engines, each with a session of its own. With ``max_replicas``, the fewest.
    max_replicas : int, optional
        The most engines. Ray starts and ends them as ``target_requests`` says; it starts ``replicas`` of them if this is left out.
    target_requests : float
        Requests per replica that Ray aims at when their number may change: about the slots of one.
    max_requests : int
        Requests that a replica takes, those that wait for a slot too. A further one goes to another replica; if all are full, it waits
        for one of them, and is refused with status 429 when as many wait as all replicas take.
    max_seconds : float, optional
        A request that lasts longer is cancelled.
    options : ServerOptions, optional
        What is allowed.
    actor : dict, optional
        What a replica needs, as Ray's ``ray_actor_options``: ``{"num_gpus": 1}`` for a replica on a GPU. Without ``num_gpus`` Ray hides the
        GPUs from it.
    block_tokens : int
        Beginnings of prompts are compared by blocks of so many tokens.

    Returns
    -------
    ray.serve.Application
        To be run.

    Raises
    ------
    ConfigError
        ``max_replicas`` is smaller than ``replicas``.
    RangeError
        A number is no positive integer.
    """
    most = int_in_range("replicas", replicas, 1) if max_replicas is None else int_in_range("max_replicas", max_replicas, 1)
    if most < int_in_range("replicas", replicas, 1):
        raise ConfigError(f"max_replicas: expected at least {replicas}, as many as replicas, got {most}.")
    int_in_range("max_requests", max_requests, 1)
    int_in_range("block_tokens", block_tokens, 1)
    count: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        scaling = AutoscalingConfig(min_replicas=replicas, max_replicas=most, target_ongoing_requests=target_requests)
        count = {"autoscaling_config": scaling}
    engines = serve.deployment(
        EngineReplica,
        name="engine",
        ray_actor_options=actor or {},
        max_ongoing_requests=max_requests,
        max_queued_requests=most * max_requests,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"block_tokens": block_tokens}),
        **count,
    )
    allowed = options or ServerOptions()

    def api() -> FastAPI:
        """Make the API where it runs: it finds the engines in its own application."""
        metrics = Metrics()
        handle = serve.get_deployment_handle("engine", app_name=serve.get_replica_context().app_name)
        engine = RemoteEngine(handle, tokenizer=Tokenizer.open(locate_model(source.folder)), observer=metrics)
        return make_app(engine, allowed, metrics=metrics)

    front = serve.deployment(serve.ingress(api)(), name="api", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=_UNBOUNDED)
    return front.bind(engines.bind(source, model=model, max_queue=max_requests, max_seconds=max_seconds))


class Arguments(BaseModel):
    """The arguments of :func:`application`.

    Parameters
    ----------
    model : str
        A Hugging Face folder, an engine folder, or a name of the Hugging Face Hub.
    name : str, optional
        What clients call it; the name of its folder if left out.
    engine : {"auto", "numpy", "tensorrt", "torch"}
        What runs it.
    slots : int, optional
        Requests that run at once in a replica; 8 if left out. An engine folder has its own.
    context : int, optional
        Tokens that a slot can hold. An engine folder has its own.
    replicas, max_replicas : int
        Engines: as many as ``replicas``, or from ``replicas`` to ``max_replicas``.
    gpus, cpus : float
        What a replica needs.
    requests : int
        Requests that a replica takes, those that wait for a slot too.
    max_seconds : float
        Longest time of a request.
    prompt_cache : int
        Memory of each replica for copies of prompts, in MiB.
    allow_anyone : bool
        Serve other machines without keys, under any name.
    trusted_proxies : list of str
        Addresses and networks of proxies whose header says which client a request comes from.
    proxy_header : {"x-forwarded-for", "forwarded"}
        That header.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    name: str | None = None
    engine: EngineChoice = "auto"
    slots: Annotated[int, Field(ge=1)] | None = None
    context: Annotated[int, Field(ge=1)] | None = None
    replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    gpus: Annotated[float, Field(ge=0)] = 0
    cpus: Annotated[float, Field(ge=0)] = 1
    requests: Annotated[int, Field(ge=1)] = 64
    max_seconds: Annotated[float, Field(gt=0)] = 600
    prompt_cache: Annotated[int, Field(ge=0)] = 256
    allow_anyone: bool = False
    trusted_proxies: list[str] = []
    proxy_header: ProxyHeader = "x-forwarded-for"


# Ray makes the arguments what their annotation says, if that is a class: this module does without `from __future__ import annotations`.
def application(arguments: Arguments) -> Application:
    """Return the application that ``serve run`` and ``serve deploy`` make of arguments.

    A key that clients must bring is taken from the environment variable ``TRT_KVCACHE_API_KEY``.

    Parameters
    ----------
    arguments : Arguments
        As ``serve run trt_kvcache.server.ray_serve:application model=FOLDER replicas=2`` has them, or ``args`` in a file.

    Returns
    -------
    ray.serve.Application
        Of :func:`make_application`.

    Raises
    ------
    ConfigError, RangeError
        An argument does not fit.
    """
    folder = Path(arguments.model)
    source = SessionSource(
        folder.resolve() if folder.is_dir() else arguments.model,
        engine=arguments.engine,
        max_batch_size=arguments.slots if is_engine_folder(folder) else arguments.slots or _SLOTS,
        max_sequence_length=arguments.context,
        prompt_cache_bytes=arguments.prompt_cache << 20,
    )
    return make_application(
        source,
        model=arguments.name or folder.resolve().name,
        replicas=arguments.replicas,
        max_replicas=arguments.max_replicas,
        target_requests=arguments.slots or _SLOTS,
        max_requests=arguments.requests,
        max_seconds=arguments.max_seconds,
        options=ServerOptions(
            api_keys=tuple(filter(None, [os.environ.get(KEY_VARIABLE)])),
            any_host=arguments.allow_anyone,
            trusted_proxies=tuple(arguments.trusted_proxies),
            proxy_header=arguments.proxy_header,
        ),
        actor={"num_gpus": arguments.gpus, "num_cpus": arguments.cpus},
    )
