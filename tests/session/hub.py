"""A Hugging Face Hub of one model on this machine: as much of its protocol as a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


@contextmanager
def fake_hub(hub_id: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder as a model.

    Yields
    ------
    str
        Its address, for ``HF_ENDPOINT``.
    list of str
        Grows: names of the files that were downloaded.
    """
    downloaded: list[str] = []
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    hashes = {name: hashlib.sha1(path.read_bytes()).hexdigest() for name, path in files.items()}
    api = f"/api/models/{hub_id}"

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            headers, status = {"X-Repo-Commit": COMMIT}, 200
            name = path.removeprefix(f"/{hub_id}/resolve/{COMMIT}/")
            if path.startswith(f"{api}/tree/"):
                entries = [{"type": "file", "path": one, "size": files[one].stat().st_size, "oid": hashes[one]} for one in files]
                data = json.dumps(entries).encode()
            elif path == f"{api}/revision/main":
                data = json.dumps({"id": hub_id, "sha": COMMIT, "siblings": [{"rfilename": one} for one in files]}).encode()
            elif name in files:
                data = files[name].read_bytes()
                headers["ETag"] = f'"{hashes[name]}"'
                if body:
                    downloaded.append(name)
            else:
                data, status = b"", 404
                headers["X-Error-Code"] = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
            self.send_response(status)
            for header, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(header, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloaded
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
