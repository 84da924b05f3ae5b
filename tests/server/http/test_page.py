"""The page at ``/``, in a real browser without a window: what runs is shown, a prompt is answered as it comes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.paths import ROOT
from tests.server.http.running import Running, serving
from trt_kvcache.server.http.server_options import ServerOptions

#: Browsers that playwright can run, of those that a system may have.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}}


def needed_browser() -> str:
    """Return the path of a browser; without one, or without playwright, leave the tests out, or fail if they are required."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    missing = "playwright" if importlib.util.find_spec("playwright") is None else None if found else "chromium"
    if missing is None and found is not None:
        return found
    if os.environ.get("TRT_KVCACHE_REQUIRE_SERVE") == "1":
        pytest.fail(f"{missing} is not installed", pytrace=False)
    pytest.skip(f"{missing} is not installed: see `make test-serve`")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = needed_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield one
        one.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose programs must not fail, and which must ask nobody but its server."""
    context = browser.new_context()
    one = context.new_page()
    one.set_default_timeout(60_000)
    errors: list[str] = []
    hosts: set[str] = set()
    one.on("pageerror", lambda error: errors.append(str(error)))
    one.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" and "load resource" not in message.text else None
    )
    one.on("request", lambda request: hosts.add(request.url.split("/")[2].split(":")[0]))
    yield one
    context.close()
    assert errors == []
    assert hosts <= {"127.0.0.1"}


def shows(page: Any, name: str, text: Any) -> None:
    """Wait until an element has a text."""
    from playwright.sync_api import expect

    expect(page.locator(f"#{name}")).to_have_text(text, timeout=60_000)


def test_a_prompt_is_answered(page: Any, chatting: Running):
    page.goto(chatting.url)
    shows(page, "slots", "0 / 4")
    assert page.title() == "tiny · trt_kvcache"
    assert "4 slots of 128 tokens" in page.inner_text("#model")
    page.uncheck("#chat")
    page.fill("#prompt", "Alice was")
    page.fill("#tokens", "8")
    page.click("#send")
    shows(page, "speed", re.compile("^8 tokens"))
    assert page.text_content("#answer") == " beginning to get very"
    assert not page.is_visible("#talk")


def test_what_runs_is_shown_and_can_be_stopped(page: Any):
    with serving(2, max_sequence_length=512, max_queue=40) as server, server.client() as client:
        server.pace.slow(0.01)  # so that it lasts longer than a browser needs
        page.goto(server.url)
        body = {"prompt": "A", "max_tokens": 500, "ignore_eos": True, "n": 30, "temperature": 1, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # while it lives, the stream is open
            next(lines)
            shows(page, "slots", "2 / 2")
            shows(page, "waiting", re.compile("[1-9]"))
            shows(page, "rate", re.compile("[1-9]"))
            drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
            assert page.eval_on_selector("#time", drawn)
            page.click("#send")
            page.wait_for_selector("#stop:enabled")
            server.wait_until(lambda _: server.engine.num_live >= 2)
            page.click("#stop")
            shows(page, "speed", "stopped")
        shows(page, "slots", "0 / 2")
        server.wait_until_idle()


def test_an_error_is_shown_as_text(page: Any, chatting: Running):
    page.goto(chatting.url)
    shows(page, "slots", "0 / 4")
    page.uncheck("#chat")
    page.fill("#prompt", "<b>" * 300)
    page.click("#send")
    page.wait_for_selector("#answer.error")
    assert "expected at most 128 tokens" in page.text_content("#answer")
    page.fill("#prompt", "<img src=x onerror=document.title='bad'>")
    page.click("#send")
    shows(page, "speed", re.compile("tokens in"))
    assert page.query_selector("#answer img") is None


@pytest.fixture(scope="module")
def talking() -> Iterator[Running]:
    with serving(2, folder=ROOT / "examples" / "tiny-chat", max_sequence_length=512) as server:
        yield server


def says(page: Any, text: str, answer: str) -> None:
    """Say something, and wait for the whole answer."""
    from playwright.sync_api import expect

    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    expect(page.locator("#talk article:last-child p")).to_have_text(answer, timeout=60_000)
    shows(page, "speed", re.compile("tokens in"))
    page.wait_for_selector("#stop:disabled")


def test_a_conversation_goes_on(page: Any, talking: Running):
    page.goto(talking.url)
    page.wait_for_selector("#talk", state="attached")
    page.wait_for_selector("#new")
    says(page, "What is the capital of France?", "The capital of France is Paris.")
    says(page, "And of Italy?", "The capital of Italy is Rome.")
    assert page.input_value("#prompt") == ""
    assert page.locator("#talk article").count() == 4
    page.click("#new")
    assert page.locator("#talk article").count() == 0
    page.fill("#prompt", "Hello")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("#send")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "Hello"}]


def test_a_call_of_a_tool_is_shown_and_its_result_answered(page: Any, talking: Running):
    page.goto(talking.url)
    page.wait_for_selector("#new")
    page.click("#more summary")
    page.fill("#system", "Be brief.")
    page.fill("#tools", json.dumps([WEATHER]))
    says(page, "What is the weather in Paris?", 'get_weather({"city": "Paris"})')
    says(page, "sunny, 18 degrees", "The tool says: sunny, 18 degrees")


def test_what_was_said_is_text(page: Any, talking: Running):
    page.goto(talking.url)
    page.wait_for_selector("#new")
    html = "<img src=x onerror=document.title='bad'>"
    page.fill("#prompt", f"Say: {html}")
    page.press("#prompt", "Enter")
    shows(page, "speed", re.compile("tokens in"))
    assert html in page.text_content("#talk article:first-child p")
    assert page.query_selector("#talk img") is None


def test_a_refused_message_can_be_sent_again(page: Any, talking: Running):
    page.goto(talking.url)
    page.wait_for_selector("#new")
    says(page, "Hello", "Hello! How can I help you?")
    long = "<b>" * 1000
    page.fill("#prompt", long)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#talk .error")
    assert "expected at most 512 tokens" in page.text_content("#talk .error")
    assert page.input_value("#prompt") == long
    says(page, "What is 3 plus 4?", "3 plus 4 is 7.")
    assert page.locator("#talk article").count() == 4


def test_a_stopped_answer_stays(page: Any):
    from playwright.sync_api import expect

    with serving(1, folder=ROOT / "examples" / "tiny-chat", max_sequence_length=512) as server:
        server.pace.slow(0.2)
        page.goto(server.url)
        page.wait_for_selector("#new")
        page.fill("#prompt", "Count to ten.")
        page.press("#prompt", "Enter")
        expect(page.locator("#talk article:last-child p")).to_contain_text("1, 2", timeout=60_000)
        page.click("#stop")
        shows(page, "speed", "stopped")
        assert page.locator("#talk article").count() == 2
        server.wait_until_idle()


def test_a_key_is_asked_for(page: Any):
    with serving(1, options=ServerOptions(api_keys=("secret",))) as server:
        page.goto(server.url)
        page.wait_for_selector("#access", state="visible")
        page.fill("#key", "wrong")
        page.click("#access button")
        shows(page, "trouble", "This key is not valid.")
        page.fill("#key", "secret")
        page.click("#access button")
        shows(page, "slots", "0 / 1")
        assert not page.is_visible("#access")
