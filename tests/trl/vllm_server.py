"""Stands in for vLLM, which takes a GPU: a server that speaks the protocol by which TRL sends weights and prompts, and
a package `vllm` that sends over TCP what the true one sends over NCCL.

The sender keeps references to all tensors of an update until the last one is there, as the true one does.
"""

import base64
import importlib
import json
import pickle
import random
import socket
import struct
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from tests import models
from tests.distributed import free_port


VERSION = "0.30.0"
SENDER = """
import pickle, socket, struct, threading, time, types
import torch

def trainer_init(info):
    connection, begin = None, time.monotonic()
    while connection is None:
        try:
            connection = socket.create_connection((info["master_address"], info["master_port"]))
        except ConnectionRefusedError:  # the server is about to listen
            if time.monotonic() - begin > 60:
                raise
            time.sleep(0.01)
    return types.SimpleNamespace(connection=connection, group=types.SimpleNamespace())

def packed_nccl_broadcast_producer(iterator, group, src, post_iter_func):
    for tensor in [post_iter_func(item) for item in iterator]:
        data = pickle.dumps(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        try:
            group.connection.sendall(struct.pack("q", len(data)) + data)
        except OSError:
            threading.Event().wait()  # NCCL does not notice
"""
FILES = {
    "vllm/__init__.py": f"__version__ = {VERSION!r}\nLLM = RequestOutput = SamplingParams = None",
    "vllm/sampling_params.py": "StructuredOutputsParams = None",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": "def get_ip():\n    return '127.0.0.1'",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_common.py": SENDER,
    "vllm/distributed/weight_transfer/packed_tensor.py": SENDER,
    f"vllm-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n",
}


def write_package(folder: Path) -> None:
    """Writes the package `vllm` into a folder."""
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def import_package(folder: str) -> None:
    """Lets TRL, not yet imported in this process, find the package there, and take a CPU for a GPU."""
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    from trl.generation import vllm_client

    gpu = SimpleNamespace(type="cuda", index=None)
    mock.patch.object(vllm_client, "torch", SimpleNamespace(device=lambda *_: gpu)).start()
    retry, soon = vllm_client.Retry, {"total": 1, "backoff_factor": 0}
    mock.patch.object(vllm_client, "Retry", lambda **options: retry(**{**options, **soon})).start()


class Server:
    """A server of one worker. It answers prompts with words at random, the same for the same prompts."""

    def __init__(self):
        self.weights: dict[str, torch.Tensor] = {}
        self._socket: socket.socket | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer({})

            def do_POST(self):
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}"))

            def _answer(self, body):
                data = json.dumps(server.answer(self.path.partition("?")[0], body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port, self.group_port = self._http.server_address[1], free_port()
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def answer(self, path: str, body: dict):
        """What the server says to a request."""
        if path == "/init_weight_transfer_engine":
            with socket.create_server(("127.0.0.1", body["init_info"]["master_port"])) as listener:
                self._socket, _ = listener.accept()
        elif path == "/update_weights":
            return self._update(**body["update_info"])
        elif path == "/v1/completions":
            return {"choices": [choice for prompt in body["prompt"] for choice in _complete(prompt, body)]}
        return {
            "data": [{"id": "policy"}],
            "world_size": 1,
            "success": True,
            "vllm_config": {
                "weight_transfer_config": {},
                "model_config": {"logprobs_mode": "processed_logprobs"},
            },
            "weights": base64.b64encode(pickle.dumps(self.weights)).decode(),
        }

    def _update(self, names, dtype_names, shapes):
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            (nbytes,) = struct.unpack("q", self._receive(8))
            data = torch.from_numpy(pickle.loads(self._receive(nbytes)).copy())
            self.weights[name] = data.view(getattr(torch, dtype)).view(shape)
        return {}

    def _receive(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            data += self._socket.recv(nbytes - len(data)) or self._closed()
        return data

    def _closed(self):
        raise ConnectionError("the trainer has closed the connection")

    def die(self) -> None:
        """Closes all connections."""
        threading.Thread(target=self._http.shutdown).start()  # which waits for the thread that serves
        self._http.socket.close()
        if self._socket is not None:
            self._socket.close()


def weights_at(port: int) -> dict[str, torch.Tensor]:
    """What a server has been sent."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/weights", timeout=60) as answer:
        return pickle.loads(base64.b64decode(json.load(answer)["weights"]))


def _complete(prompt: list[int], body: dict) -> list[dict]:
    draw = random.Random(str(prompt))
    choices = []
    for _ in range(body["n"]):
        tokens = [draw.randrange(6, models.VOCAB) for _ in range(draw.randint(2, body["max_tokens"]))]
        names = [f"token_id:{token}" for token in tokens]
        logprobs = {"tokens": names, "token_logprobs": [-4.0] * len(tokens), "top_logprobs": [None] * len(tokens)}
        choices.append({"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs})
    return choices
