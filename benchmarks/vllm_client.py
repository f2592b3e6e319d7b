"""What the client of `--vllm_url` costs: its requests against raw ones, and a synchronisation by size.

    python benchmarks/vllm_client.py [--rounds 5] [--delay 2] [--tokens 512]

A server of the standard library, in a process of its own, answers each request after a fixed delay
with the same JSON as vLLM. The raw client sends the same requests from as many threads and throws
the answers away. Both are timed in turn. Below, a model of each size is written as for a server,
with safetensors and all, to the folder of `--output`.
"""

import argparse
import concurrent.futures
import http.client
import json
import multiprocessing
import statistics
import tempfile
import time
import types
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from preference_recipes.rollouts import vllm

ASSETS = Path(__file__).resolve().parent.parent / "assets"
PROMPTS = 64
RESPONSES = 8  # to each prompt: 512
PROMPT_TOKENS = 100
WIDTHS = (256, 512, 1024)  # of the models that are written


def serve(pipe, delay: float, n_tokens: int) -> None:
    """Answers with the same responses after `delay` seconds, each request in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            if self.path == "/collective_rpc":
                answer = {"results": [{"version": ""}]}
            else:
                time.sleep(delay)
                choice = {
                    "token_ids": [7] * n_tokens,
                    "logprobs": {"token_logprobs": [-1.2345678] * n_tokens},
                    "prompt_token_ids": content["prompt"],
                    "finish_reason": "length",
                }
                numbers = range(content["n"])
                answer = {"choices": [{"index": number, **choice} for number in numbers]}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    pipe.send(server.server_port)
    server.serve_forever()


def requests_of_rollout(n_tokens: int) -> list[dict]:
    sampler = types.SimpleNamespace(tokens_without_probability=lambda: [], stop_tokens=lambda: {1})
    sampler.args = types.SimpleNamespace(max_length=PROMPT_TOKENS + n_tokens)
    uniforms = np.random.default_rng(0).random((PROMPTS, RESPONSES, n_tokens))
    return vllm.make_requests(sampler, [[5] * PROMPT_TOKENS] * PROMPTS, uniforms, 1.0)


def raw(url: str, requests: list[dict]) -> None:
    address = urllib.parse.urlsplit(url).netloc

    def post(request: dict) -> None:
        connection = http.client.HTTPConnection(address)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(request), headers)
        json.loads(connection.getresponse().read())
        connection.close()

    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(post, requests))


def ours(url: str, requests: list[dict]) -> None:
    servers = object.__new__(vllm.Servers)  # a new one would give its server weights
    servers.servers = [vllm.Server(url)]
    servers.version = ""
    responses = servers.ask(requests)
    assert len(responses) == PROMPTS * RESPONSES


def seconds(function, *args) -> float:
    started = time.perf_counter()
    function(*args)
    return time.perf_counter() - started


def compare_requests(rounds: int, delay: float, n_tokens: int) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(there, delay, n_tokens), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{here.recv()}"
    requests = requests_of_rollout(n_tokens)
    raw(url, requests)
    ratios = []
    for number in range(rounds):
        of_raw, of_ours = seconds(raw, url, requests), seconds(ours, url, requests)
        ratios.append(of_ours / of_raw)
        print(f"round {number}: raw {of_raw:.3f} s, ours {of_ours:.3f} s")
    print(f"{PROMPTS * RESPONSES} responses of {n_tokens} tokens: ours / raw {statistics.median(ratios):.3f}")  # fmt: skip
    process.terminate()


def time_writes(folder: Path) -> None:
    for width in WIDTHS:
        config = LlamaConfig(
            vocab_size=32000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=8
        )
        model = LlamaForCausalLM(config)
        size = sum(p.numel() for p in model.parameters()) * 4
        took = min(seconds(model.save_pretrained, folder / str(width)) for _ in range(3))
        print(f"{size / 2**20:7.0f} MiB written in {took:.2f} s: {size / 2**20 / took:.0f} MiB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay", type=float, default=2.0, help="seconds")
    parser.add_argument("--tokens", type=int, default=512, help="of a response")
    parser.add_argument("--output", type=Path, help="where models are written; default: /tmp")
    args = parser.parse_args()
    compare_requests(args.rounds, args.delay, args.tokens)
    with tempfile.TemporaryDirectory(dir=args.output) as folder:
        time_writes(Path(folder))


if __name__ == "__main__":
    main()
