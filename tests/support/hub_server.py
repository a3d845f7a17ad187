"""A small server on loopback that speaks the protocol of the Hugging Face Hub, and logs every
request.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Repo:
    """Files of each revision of a repository; `error` refuses every request to it."""

    revisions: dict[str, dict[str, bytes]]
    error: tuple[int, str] | None = None

    def commit(self, revision: str) -> str:
        """The commit of a revision: a checksum of its name."""
        return hashlib.sha1(revision.encode()).hexdigest()

    def files(self, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or a commit."""
        for name, files in self.revisions.items():
            if revision in (name, self.commit(name)):
                return files
        return None


@dataclass
class HubServer:
    """The repositories of a server, and what was asked of it: method, path, and range of bytes."""

    repos: dict[str, Repo] = field(default_factory=dict[str, Repo])
    requests: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    # Sizes that the server claims, and after how many bytes its next answers of a file end.
    claimed_sizes: dict[str, int] = field(default_factory=dict[str, int])
    cuts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    url: str = ""

    def fetched(self) -> set[str]:
        """The files of which bytes were asked for."""
        paths = [path for method, path, _ in self.requests if method == "GET"]
        return {
            path.split("/resolve/")[1].partition("/")[2] for path in paths if "/resolve/" in path
        }

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._http.shutdown()
        self._http.server_close()

    def start(self) -> None:
        """Serve in a thread."""
        handler = type("Handler", (HubHandler,), {"server_state": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()


class HubHandler(BaseHTTPRequestHandler):
    """Answers the requests of `huggingface_hub` for models."""

    protocol_version = "HTTP/1.1"
    server_state: ClassVar[HubServer]

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing to stderr."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        state = self.server_state
        state.requests.append((self.command, unquote(url.path), self.headers.get("Range", "")))
        is_api = parts[:2] == ["api", "models"]
        repo_parts = parts[2:] if is_api else parts
        repo = state.repos.get("/".join(repo_parts[:2]))
        if repo is None:
            return self.refuse(401, "")  # as the Hub does without a login
        if repo.error is not None:
            return self.refuse(*repo.error)
        rest = repo_parts[2:]
        revision = rest[1] if len(rest) > 1 else "main"
        files = repo.files(revision)
        if files is None:
            return self.refuse(404, "RevisionNotFound")
        commit = next(repo.commit(name) for name in repo.revisions if repo.files(name) is files)
        if is_api:
            return self.answer_api("/".join(repo_parts[:2]), rest[:1], commit, files)
        return self.answer_file("/".join(rest[2:]), commit, files)

    def answer_api(
        self, name: str, kind: list[str], commit: str, files: Mapping[str, bytes]
    ) -> None:
        sizes = {
            file: self.server_state.claimed_sizes.get(file, len(files[file])) for file in files
        }
        if kind == ["tree"]:
            tree = [
                {"type": "file", "path": file, "size": size, "oid": etag(files[file])}
                for file, size in sizes.items()
            ]
            return self.send(200, json.dumps(tree).encode())
        siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]
        info = {"_id": "0", "id": name, "sha": commit, "private": False, "tags": []}
        return self.send(200, json.dumps(info | {"siblings": siblings}).encode())

    def answer_file(self, name: str, commit: str, files: Mapping[str, bytes]) -> None:
        if name not in files:
            return self.refuse(404, "EntryNotFound")
        data = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag(data)}"', "Accept-Ranges": "bytes"}
        if self.command == "HEAD" and name.endswith(".safetensors"):
            headers |= {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(data))}
        start = self.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
        if start:
            total = len(data)
            data = data[int(start) :]
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        cuts = self.server_state.cuts.get(name, []) if self.command == "GET" else []
        cut = cuts.pop(0) if cuts else None
        return self.send(206 if start else 200, data, headers, cut)

    def refuse(self, status: int, code: str) -> None:
        self.send(status, b"", {"X-Error-Code": code} if code else {})

    def send(
        self,
        status: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.close_connection = True


def etag(data: bytes) -> str:
    """The checksum by which the cache names a file."""
    return hashlib.sha256(data).hexdigest()


def read_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@contextmanager
def running_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server that this process and its children take for the Hub, with an empty cache."""
    from huggingface_hub import constants

    server = HubServer()
    server.start()
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    try:
        yield server
    finally:
        server.stop()
