"""The page at ``/``, in a real browser without a window: what runs is shown, a prompt is answered as it comes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.http.running import Running, serving
from trt_kvcache.server.http.options import ServerOptions

#: Browsers that playwright can run, of those that a system may have.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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
    page.fill("#tokens", "8")
    page.click("#send")
    shows(page, "speed", re.compile("^8 tokens"))
    assert page.text_content("#answer") == " beginning to get very"
    page.check("#chat")
    page.click("#send")
    shows(page, "speed", re.compile("^8 tokens"))
    assert page.text_content("#answer") != " beginning to get very"


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
