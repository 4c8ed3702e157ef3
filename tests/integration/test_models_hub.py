"""Hub ids: the real client against a small hub on this machine; nothing leaves it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
COMMIT = "a" * 40
REFUSALS = {
    "gated": (403, "GatedRepo"),
    "private": (401, "RepoNotFound"),
}


@dataclass
class Hub:
    """A hub with one readable repository, ``org/open``, and others that refuse."""

    url: str
    files: dict[str, bytes]
    requests: list[str] = field(default_factory=list)


def repository(directory: Path) -> dict[str, bytes]:
    save_file({"w": np.ones((3, 4), np.float32)}, directory / "model.safetensors")
    return {
        "config.json": json.dumps({"model_type": "bert", "architectures": ["BertModel"]}).encode(),
        "tokenizer.json": b"{}",
        "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
        "model.safetensors": (directory / "model.safetensors").read_bytes(),
        "pytorch_model.bin": b"never fetched",
        "onnx/model.onnx": b"never fetched",
    }


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def reply(self, code: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def reply_json(self, value: object) -> None:
            self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            for name, (code, error) in REFUSALS.items():
                if f"/org/{name}" in path:
                    self.reply(code, X_Error_Code=error, X_Error_Message=error)
                    return
            if path.startswith("/api/models/org/open/tree/"):
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in hub.files.items()
                ]
                self.reply_json(entries)
            elif (
                path in ("/api/models/org/open", "/api/models/org/open/revision/main")
                or path == f"/api/models/org/open/revision/{COMMIT}"
            ):
                self.reply_json(
                    {"id": "org/open", "sha": COMMIT, "siblings": [{"rfilename": n} for n in hub.files]}
                )
            elif path.startswith("/api/models/org/open/revision/"):
                self.reply(404, X_Error_Code="RevisionNotFound")
            elif path.startswith(f"/org/open/resolve/{COMMIT}/"):
                data = hub.files[path.removeprefix(f"/org/open/resolve/{COMMIT}/")]
                self.reply(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=COMMIT)
            else:
                self.reply(404, X_Error_Code="RepoNotFound")

    return Handler


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "made"
    folder.mkdir()
    made = Hub("", repository(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(made))
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def inspect(hub: Hub, home: Path, ref: str, revision: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run checkpoint_info in a process of its own: the client reads its environment once."""
    script = (
        "import sys; from audit.errors import CheckpointError; from audit.models import checkpoint_info\n"
        f"try: print(checkpoint_info({ref!r}, revision={revision!r}))\n"
        "except CheckpointError as error: print(error); sys.exit(int(error.exit_code))\n"
    )
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    environment = {
        k: v for k, v in os.environ.items() if k.lower() not in ("http_proxy", "https_proxy", "all_proxy")
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_a_hub_checkpoint_is_fetched_once_at_its_resolved_revision(hub, tmp_path):
    done = inspect(hub, tmp_path / "home", "org/open")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"revision='{COMMIT}'" in done.stdout
    assert "parameters=12" in done.stdout
    fetched = {r.partition(COMMIT + "/")[2] for r in hub.requests if r.startswith("GET") and "/resolve/" in r}
    assert fetched == {"config.json", "tokenizer.json", "1_Pooling/config.json", "model.safetensors"}
    hub.requests.clear()
    again = inspect(hub, tmp_path / "home", "org/open", COMMIT)
    assert again.stdout == done.stdout
    assert not [r for r in hub.requests if r.startswith("GET") and "/resolve/" in r]


def test_a_revision_that_is_not_there_is_named(hub, tmp_path):
    done = inspect(hub, tmp_path / "home", "org/open", "v9")
    assert done.returncode == 12
    assert "no revision 'v9'" in done.stdout


@pytest.mark.parametrize("name", ["gated", "private", "absent"])
def test_a_repository_that_refuses_names_the_token(hub, tmp_path, name):
    done = inspect(hub, tmp_path / "home", f"org/{name}")
    assert done.returncode == 12, done.stderr
    assert done.stdout.startswith(f"checkpoint org/{name}: ")
    assert "HF_TOKEN" in done.stdout
    assert done.stdout.count("\n") == 1


def test_a_hub_that_cannot_be_reached_is_an_error(hub, tmp_path):
    hub.url = "http://127.0.0.1:9"
    done = inspect(hub, tmp_path / "home", "org/open")
    assert done.returncode == 12, done.stderr
    assert "out of reach" in done.stdout
    assert "HF_TOKEN" in done.stdout
