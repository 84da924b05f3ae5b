"""``Clients``: the name of the client of a request: its key, or its address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.types import Scope

from trt_kvcache.server.http.server_options import ServerOptions

#: Prefix of IPv6 addresses that a provider gives to one client.
_IPV6_PREFIX = 64

#: Most proxies in a chain that are followed.
_MOST_PROXIES = 16

_FOR = re.compile(r'(?:^|;)\s*for="?([^;"]+)"?\s*(?:;|$)', re.IGNORECASE)

_Address = IPv4Address | IPv6Address


class Clients:
    """Names the clients of a server: by key if there are keys, else by address (IPv6: by its /64 prefix)."""

    # Behind trusted proxies, the client is the last address in their header that is no trusted proxy. Headers of others are ignored.

    def __init__(self, options: ServerOptions) -> None:
        self._proxies = [ip_network(proxy) for proxy in options.trusted_proxies]
        self._header = options.proxy_header.encode()

    def name(self, scope: Scope, key: int | None = None) -> str:
        """Return the name of the client of a request; ``key`` is the index of its API key."""
        if key is not None:
            return f"key {key}"
        address = parsed_address(scope["client"][0]) if scope.get("client") else None
        if address is None:  # a Unix socket, or a server that does not say
            return ""
        if self._trusts(address):
            address = self._client_of(address, scope)
        return named(address)

    def _trusts(self, address: _Address) -> bool:
        return any(address in network for network in self._proxies)

    def _client_of(self, proxy: _Address, scope: Scope) -> _Address:
        """Return the client of a trusted proxy. Each proxy appends to the header, so it is read from its end, up to an invalid entry."""
        for _, entry in zip(range(_MOST_PROXIES), self._entries(scope), strict=False):
            address = parsed_address(entry)
            if address is None:
                return proxy
            if not self._trusts(address):
                return address
            proxy = address
        return proxy

    def _entries(self, scope: Scope) -> Iterator[str]:
        """Yield the entries of the header of proxies, the last one first."""
        lines = [value.decode("latin-1") for name, value in scope["headers"] if name == self._header]
        for line in reversed(lines):
            while line:
                line, _, entry = line.rpartition(",")
                if self._header == b"forwarded":
                    found = _FOR.search(entry)
                    entry = found[1] if found else ""
                yield entry


def named(address: _Address) -> str:
    """Return the name of a client: an IPv4 address, or a network such as ``2001:db8::/64``."""
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address), _IPV6_PREFIX), strict=False))
    return str(address)


def parsed_address(text: str) -> _Address | None:
    """Parse an address in a header, with or without a port, such as ``[2001:db8::1]:80``; None if it is no address."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
