"""Which requests the server answers, and the headers of every answer.

The page shows private texts and can change a model, so that other web sites must not be able to
reach it through the browser: every request must name this server as its host, every request of the
interface must carry the token of this launch, and requests from other origins are refused.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Message, Receive, Send], Awaitable[None]]

API_PREFIX = "/api/"
TOKEN_HEADER = b"x-session-token"
MAX_BODY_BYTES = 2**20
BODY_TYPES = ("application/json", "application/octet-stream")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; "
    "font-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
SECURITY_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
PRIVATE_CACHE = (b"cache-control", b"no-store")  # answers of the interface hold the user's texts
FILE_CACHE = (
    b"cache-control",
    b"no-cache",
)  # files of the page are the same until headwise is updated
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
ALL_ADDRESSES = ("0.0.0.0", "::")
# Addresses that are reserved for documentation: asking for the route to them sends nothing.
DOCUMENTATION_ADDRESSES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


class SecurityMiddleware:
    """Refuses requests of other hosts, origins and sessions, and adds security headers to every
    answer.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], token: str) -> None:
        self.app = app
        self.hosts = frozenset(hosts)
        self.token = token.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets

        own = (
            *SECURITY_HEADERS,
            PRIVATE_CACHE if scope["path"].startswith(API_PREFIX) else FILE_CACHE,
        )
        own_names = {name for name, _ in own}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [
                    pair for pair in message.get("headers", []) if pair[0].lower() not in own_names
                ]
                message = {**message, "headers": [*headers, *own]}
            await send(message)

        status = self._refusal(scope)
        if status:
            await send_with_headers(
                {"type": "http.response.start", "status": status, "headers": []}
            )
            await send_with_headers({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send_with_headers)

    def _refusal(self, scope: Message) -> int:
        """The status of a refused request; 0 if it may be answered."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)

        def single(name: bytes) -> bytes | None:
            values = headers.get(name, [])
            return values[0] if len(values) == 1 else b"" if values else None

        host = single(b"host")
        if host is None or host.decode("latin-1").lower() not in self.hosts:
            return 421
        origin = single(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in {
            f"http://{name}" for name in self.hosts
        }:
            return 403
        if single(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            return 403
        if scope["method"] not in ("GET", "HEAD", "POST", "DELETE"):
            return 405
        if not scope["path"].startswith(API_PREFIX):
            return 0 if scope["method"] in ("GET", "HEAD") else 405
        if not hmac.compare_digest(single(TOKEN_HEADER) or b"", self.token):
            return 401
        return self._body_refusal(scope, single)

    @staticmethod
    def _body_refusal(scope: Message, single: Callable[[bytes], bytes | None]) -> int:
        if scope["method"] != "POST":
            return 0
        content_type = (
            (single(b"content-type") or b"").decode("latin-1").partition(";")[0].strip().lower()
        )
        if content_type not in BODY_TYPES:
            return 415
        length = single(b"content-length")
        if length is not None and (not length.isdigit() or int(length) > MAX_BODY_BYTES):
            return 413
        return 0


def allowed_hosts(host: str, port: int) -> list[str]:
    """The values of the Host header that name this server."""
    if is_loopback(host):
        names = {*LOOPBACK_NAMES}
    elif host in ALL_ADDRESSES:
        names = {*LOOPBACK_NAMES, *machine_names()}
    else:
        names = {f"[{host}]" if ":" in host else host}
    return sorted(f"{name.lower()}:{port}" for name in names)


def machine_names() -> list[str]:
    """The addresses of this machine in its networks, then its host name, as they stand in a URL."""
    names: list[str] = []
    for family, target in DOCUMENTATION_ADDRESSES:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                address = str(probe.getsockname()[0])
        except OSError:
            continue  # no network of this family
        names.append(f"[{address}]" if family == socket.AF_INET6 else address)
    return [*names, socket.gethostname()]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    return host in ("127.0.0.1", "localhost", "::1")
