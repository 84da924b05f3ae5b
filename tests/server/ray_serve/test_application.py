"""What is asked of Ray: as many replicas as wanted, each with what it needs."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from tests.server.needs_ray import need_ray

need_ray()

from tests.helpers.engine_files import make_engine_folder  # noqa: E402
from tests.server.engines import MODEL, source  # noqa: E402
from trt_kvcache.errors import ConfigError, RangeError  # noqa: E402
from trt_kvcache.server.engine_stats import EngineStats  # noqa: E402
from trt_kvcache.server.ray_serve import Arguments, application, make_application, prefix_router  # noqa: E402


def engines_of(app):
    """Return the deployment of the engines, which the API is bound to."""
    [bound] = app._bound_deployment.init_args
    return bound._bound_deployment


def test_replicas_are_as_many_as_wanted():
    engines = engines_of(make_application(source(2), model="tiny", replicas=3, max_requests=5, actor={"num_gpus": 1}))
    assert (engines.num_replicas, engines.max_ongoing_requests, engines.max_queued_requests) == (3, 5, 15)
    assert engines.ray_actor_options["num_gpus"] == 1


def test_their_number_follows_the_load_between_bounds():
    engines = engines_of(make_application(source(2), model="tiny", replicas=2, max_replicas=4, target_requests=6))
    scaling = engines._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 4, 6)


def test_arguments_name_a_source():
    engines = engines_of(application(Arguments(model=str(MODEL), engine="reference", slots=3, gpus=0.5, prompt_cache=2)))
    [opened] = engines.init_args
    assert (opened.folder, opened.options.max_batch_size, opened.options.prompt_cache_bytes) == (MODEL, 3, 2 << 20)
    assert engines.init_kwargs["model"] == MODEL.name
    assert engines.ray_actor_options["num_gpus"] == 0.5


def test_arguments_name_adapters(tmp_path, monkeypatch):
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    [opened] = engines_of(application(Arguments(model=str(MODEL), adapters={"a": "sql", "b": "org/lora"}))).init_args
    assert opened.options.adapters == {"a": str(tmp_path / "sql"), "b": "org/lora"}


def test_prompts_of_different_adapters_have_different_prefixes():
    def prompt(*arguments):
        return prefix_router._prompt(SimpleNamespace(args=arguments))

    tokens = [*range(16)]
    assert prompt({"token_ids": tokens}) == prompt({"token_ids": tokens, "adapter": None}) == tokens
    first, other = (prompt({"token_ids": tokens, "adapter": name}) for name in ("sql", "poems"))
    assert first[1:] == other[1:] == tokens
    assert first[0] != other[0]
    assert prompt() == prompt("stats") == prompt({"token_ids": "x"}) == ()


def test_replicas_aim_at_as_many_requests_as_they_have_slots(tmp_path):
    """An engine folder has its own number, and refuses another one."""
    folder = tmp_path / "engine"
    make_engine_folder(MODEL, folder)  # of 3 slots
    for model, slots, expected in ((MODEL, 5, 5), (MODEL, None, 8), (folder, None, 3)):
        engines = engines_of(application(Arguments(model=str(model), engine="reference", slots=slots, max_replicas=2)))
        assert engines._deployment_config.autoscaling_config.target_ongoing_requests == expected


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"replicas": 3, "max_replicas": 2}, ConfigError, "max_replicas: expected at least 3, as many as replicas, got 2."),
        ({"replicas": 0}, RangeError, "replicas: expected"),
        ({"max_requests": 0}, RangeError, "max_requests: expected"),
        ({"block_tokens": 0}, RangeError, "block_tokens: expected"),
    ],
)
def test_what_does_not_fit_is_said(options, error, said):
    with pytest.raises(error, match=said):
        make_application(source(2), model="tiny", **options)


def test_an_argument_that_is_not_known_is_an_error():
    with pytest.raises(ValidationError, match="replcas"):
        Arguments(model="x", replcas=2)


def test_statistics_of_several_engines_are_sums_and_all_slots():
    with source(2)() as first, source(2)() as second:
        for session, count in ((first, 1), (second, 2)):
            for _ in range(count):
                session.submit([5, 6, 7], max_new_tokens=2)
            session.step()
        parts = [EngineStats.of(first), EngineStats.of(second)]
    both = EngineStats.together(parts)
    assert len(both.slots) == 3
    assert both.session.prefill_tokens == 9
    assert both.session.cache_bytes_reserved == 2 * parts[0].session.cache_bytes_reserved
