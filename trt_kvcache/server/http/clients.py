"""``Clients``: the name of the client that a request comes from: its key, or its address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.types import Scope

from trt_kvcache.server.http.options import ServerOptions

#: Bits of an IPv6 address that a provider gives to one client, who has all addresses behind them.
_IPV6_PREFIX = 64

#: Proxies one behind another that are followed.
_MOST_PROXIES = 16

_FOR = re.compile(r'(?:^|;)\s*for="?([^;"]+)"?\s*(?:;|$)', re.IGNORECASE)

_Address = IPv4Address | IPv6Address


class Clients:
    """Names the clients of a server."""

    def __init__(self, options: ServerOptions) -> None:
        self._proxies = [ip_network(proxy) for proxy in options.trusted_proxies]
        self._header = options.proxy_header.encode()

    def name(self, scope: Scope, key: int | None = None) -> str:
        """Return the name of the client of a connection, which has the key of that number if there are keys."""
        if key is not None:
            return f"key {key}"
        address = parsed_address(scope["client"][0]) if scope.get("client") else None
        if address is None:  # a Unix socket, or a server that does not say
            return ""
        if self._trusts(address):
            address = self._behind(address, scope)
        return named(address)

    def _trusts(self, address: _Address) -> bool:
        return any(address in network for network in self._proxies)

    def _behind(self, proxy: _Address, scope: Scope) -> _Address:
        """Return the client behind a proxy. Each proxy writes at the end, so the header is read from there; an entry that is no address
        says nothing, and neither do those before it.
        """
        for _, entry in zip(range(_MOST_PROXIES), self._entries(scope), strict=False):
            address = parsed_address(entry)
            if address is None:
                return proxy
            if not self._trusts(address):
                return address
            proxy = address
        return proxy

    def _entries(self, scope: Scope) -> Iterator[str]:
        """Yield what the header of proxies says of clients, the last one first."""
        lines = [value.decode("latin-1") for name, value in scope["headers"] if name == self._header]
        for line in reversed(lines):
            while line:
                line, _, entry = line.rpartition(",")
                if self._header == b"forwarded":
                    found = _FOR.search(entry)
                    entry = found[1] if found else ""
                yield entry


def named(address: _Address) -> str:
    """Return the name of a client that has an address."""
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address), _IPV6_PREFIX), strict=False))
    return str(address)


def parsed_address(text: str) -> _Address | None:
    """Return an address as headers have it, with a port or without; None for anything else."""
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
