"""The Ray Serve application: a deployment with OpenAI's API, and a deployment of engine replicas."""

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
from trt_kvcache.engine_folder.inspection import inspect_engine
from trt_kvcache.errors import ConfigError
from trt_kvcache.server.http import ServerOptions, make_app
from trt_kvcache.server.http.metrics import Metrics
from trt_kvcache.server.http.server_options import ProxyHeader
from trt_kvcache.server.ray_serve.prefix_router import PrefixRouter
from trt_kvcache.server.ray_serve.remote_engine import RemoteEngine
from trt_kvcache.server.ray_serve.replica import EngineReplica
from trt_kvcache.session.model_location import locate_model
from trt_kvcache.session.session_options import EngineChoice
from trt_kvcache.session.session_source import SessionSource

#: Environment variable with the API key, as in the command ``serve``.
KEY_VARIABLE = "TRT_KVCACHE_API_KEY"

#: Slots of a session of a model folder.
_SLOTS = 8

#: Most requests of the API deployment, which forwards them: the engines have the limits.
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
    """Return an application for ``ray.serve.run``."""
    # source: its folder must exist on each machine. replicas: the fewest if max_replicas is given; Ray scales between them, aiming at
    # target_requests per replica. max_requests: running and waiting requests of a replica; further ones go to another replica, wait for
    # one in the router, or are refused with status 429 if as many wait. actor: ray_actor_options of a replica, such as {"num_gpus": 1};
    # without num_gpus Ray hides the GPUs. block_tokens: see PrefixRouting.
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
        """Make the API in its replica, where it finds the engines of its own application."""
        metrics = Metrics()
        handle = serve.get_deployment_handle("engine", app_name=serve.get_replica_context().app_name)
        engine = RemoteEngine(handle, tokenizer=Tokenizer.open(locate_model(source.folder)), observer=metrics)
        return make_app(engine, allowed, metrics=metrics)

    front = serve.deployment(serve.ingress(api)(), name="api", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=_UNBOUNDED)
    return front.bind(engines.bind(source, model=model, max_queue=max_requests, max_seconds=max_seconds))


class Arguments(BaseModel):
    """The arguments of :func:`application`."""

    model_config = ConfigDict(extra="forbid")

    model: str  # a Hugging Face folder, an engine folder, or a name of the Hugging Face Hub
    name: str | None = None  # of the model for clients; else the name of its folder
    engine: EngineChoice = "auto"
    slots: Annotated[int, Field(ge=1)] | None = None  # of a replica; an engine folder has its own, like context
    context: Annotated[int, Field(ge=1)] | None = None  # tokens of a slot
    replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    gpus: Annotated[float, Field(ge=0)] = 0  # of a replica
    cpus: Annotated[float, Field(ge=0)] = 1
    requests: Annotated[int, Field(ge=1)] = 64  # of a replica, running and waiting
    max_seconds: Annotated[float, Field(gt=0)] = 600
    prompt_cache: Annotated[int, Field(ge=0)] = 256  # MiB of a replica
    adapters: dict[str, str] = {}  # folders of LoRA adapters, or names of the Hugging Face Hub, by the names of their models for clients
    allow_anyone: bool = False  # serve other machines without a key
    trusted_proxies: list[str] = []
    proxy_header: ProxyHeader = "x-forwarded-for"


# Ray converts the arguments if their annotation is a class, so this module has no `from __future__ import annotations`.
def application(arguments: Arguments) -> Application:
    """Return the application for ``serve run`` and ``serve deploy``. ``TRT_KVCACHE_API_KEY`` is the API key."""
    folder = Path(arguments.model)
    source = SessionSource(
        _resolved(arguments.model),
        engine=arguments.engine,
        max_batch_size=arguments.slots if is_engine_folder(folder) else arguments.slots or _SLOTS,
        max_sequence_length=arguments.context,
        prompt_cache_bytes=arguments.prompt_cache << 20,
        adapters={name: str(_resolved(adapter)) for name, adapter in arguments.adapters.items()} or None,
    )
    return make_application(
        source,
        model=arguments.name or folder.resolve().name,
        replicas=arguments.replicas,
        max_replicas=arguments.max_replicas,
        target_requests=arguments.slots or (inspect_engine(folder).cache.max_batch_size if is_engine_folder(folder) else _SLOTS),
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


def _resolved(place: str) -> str | Path:
    """Return the whole path of a folder; names of the Hugging Face Hub stay."""
    folder = Path(place)
    return folder.resolve() if folder.is_dir() else place
