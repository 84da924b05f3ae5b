"""Which client a request comes from: its key, its address, or the address that a trusted proxy says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.http.running import serving
from trt_kvcache.errors import ConfigError
from trt_kvcache.server.http.clients import Clients
from trt_kvcache.server.http.server_options import ServerOptions

PROXIES = ("10.0.0.0/8", "2001:db8:ffff::1")


def name(peer: str | None, *lines: str, header: str = "x-forwarded-for", key: int | None = None, **options: Any) -> str:
    headers = [(header.encode(), line.encode()) for line in lines]
    clients = Clients(ServerOptions(**{"trusted_proxies": PROXIES, **options}))
    return clients.name({"client": None if peer is None else (peer, 1234), "headers": headers}, key)


@pytest.mark.parametrize(
    ("peer", "lines", "found"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["198.51.100.7"], "192.0.2.1"),  # not trusted
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["1.1.1.1, 198.51.100.7"], "198.51.100.7"),  # the first one was written by the client
        ("10.0.0.1", ["1.1.1.1", "198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["198.51.100.7, 10.2.3.4"], "198.51.100.7"),  # two proxies
        ("10.0.0.1", ["10.2.3.4"], "10.2.3.4"),
        ("10.0.0.1", ["198.51.100.7:5678"], "198.51.100.7"),
        ("10.0.0.1", ["[2001:db8::1:2:3:4]:80"], "2001:db8::/64"),
        ("2001:db8:ffff::1", ["2001:db8::9"], "2001:db8::/64"),
        ("::ffff:10.0.0.1", ["::ffff:198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["198.51.100.7, unknown"], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7, unknown, 10.9.9.9"], "10.9.9.9"),
        ("10.0.0.1", [""], "10.0.0.1"),
        ("10.0.0.1", ["1.1.1.1, " + "10.0.0.2, " * 5000 + "10.0.0.3"], "10.0.0.2"),
        ("fe80::1%eth0", [], "fe80::/64"),
        (None, ["198.51.100.7"], ""),
        ("a socket", ["198.51.100.7"], ""),
    ],
)
def test_addresses(peer, lines, found):
    assert name(peer, *lines) == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("for=198.51.100.7", "198.51.100.7"),
        ('For="[2001:db8::1]:4711";proto=https', "2001:db8::/64"),
        ("for=1.1.1.1, proto=http;for=198.51.100.7;by=10.0.0.1", "198.51.100.7"),
        ('for=", for=198.51.100.7', "198.51.100.7"),  # an open quotation mark hides nothing
        ("for=1.1.1.1, proto=https", "10.0.0.1"),  # the last one does not say
        ("for=_hidden", "10.0.0.1"),
        ("xfor=198.51.100.7", "10.0.0.1"),
    ],
)
def test_the_header_of_the_standard(line, found):
    assert name("10.0.0.1", line, header="forwarded", proxy_header="forwarded") == found


@pytest.mark.parametrize(("sent", "read"), [("forwarded", "x-forwarded-for"), ("x-forwarded-for", "forwarded"), ("x-real-ip", "forwarded")])
def test_the_header_that_these_proxies_do_not_write_is_not_read(sent, read):
    assert name("10.0.0.1", "198.51.100.7", "for=198.51.100.7", header=sent, proxy_header=read) == "10.0.0.1"


def test_a_key_is_a_client_from_any_address():
    assert {name("192.0.2.1", key=1), name("192.0.2.2", key=1), name("10.0.0.1", "1.1.1.1", key=1)} == {"key 1"}


@pytest.mark.parametrize("proxy", ["*", "proxy", "0.0.0.0/0", "::/0", "10.0.0.1/8", ""])
def test_what_is_no_proxy_is_refused(proxy):
    with pytest.raises(ConfigError, match=r"trusted_proxies: expected"):
        ServerOptions(trusted_proxies=(proxy,))


def test_a_header_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="proxy_header: expected"):
        ServerOptions(proxy_header="x-real-ip")  # type: ignore[arg-type]


LONG = {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True}
SHORT = {"prompt": [7], "max_tokens": 1}


def beside_a_full_queue(first: dict[str, str], second: dict[str, str], **options: Any) -> list[int]:
    """Have a client fill slots and queue; return the statuses of a further request of its own, and of one with other headers."""
    with serving(1, max_queue=3, options=ServerOptions(**options)) as server, server.client() as client, ThreadPoolExecutor(2) as threads:

        def post(body: dict[str, Any], headers: dict[str, str]) -> int:
            return client.post("/v1/completions", json=body, headers=headers).status_code

        with server.held():
            many = threads.submit(post, {**LONG, "n": 4}, first)
            server.wait_until(lambda now: now.waiting == 4)
            refused = post(SHORT, first)
            other = threads.submit(post, SHORT, second)
            server.wait_until(lambda now: now.waiting == 5 or other.done())
        assert many.result(60) == 200
        return [refused, other.result(60)]


def test_each_key_has_its_share_of_the_queue():
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
    assert beside_a_full_queue(first, second, api_keys=("first", "second")) == [429, 200]


def test_a_header_from_an_address_that_is_not_trusted_gives_no_share():
    assert beside_a_full_queue({"X-Forwarded-For": "192.0.2.1"}, {"X-Forwarded-For": "192.0.2.2"}) == [429, 429]


def test_clients_behind_a_trusted_proxy_have_each_its_share():
    first, second = ({"X-Forwarded-For": f"203.0.113.1, {address}"} for address in ("192.0.2.1", "192.0.2.2"))
    assert beside_a_full_queue(first, second, trusted_proxies=("127.0.0.1",)) == [429, 200]
