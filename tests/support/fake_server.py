"""A small OpenAI-compatible streaming server for tests, with a token budget that matters and faults on request.

Run as a program. One loop serves every stream as a chunked-prefill engine does: an iteration holds all decodes and
prompt tokens up to the budget, and takes ``--base-ms`` and ``--token-ms`` a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import dataclass, field

FAULTS = ("none", "exit", "never-healthy", "die", "error-500", "stall", "short", "stream-error")


@dataclass
class Job:
    """One request inside the server."""

    prompt_tokens: int
    output_tokens: int
    num_prefilled: int = 0
    num_generated: int = 0
    out: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


class FakeServer:
    """The server; ``most_open`` is the largest number of streams that were open at once. The first ``--fault-after``
    requests (the client's warm-up) know neither faults nor holding."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        hit = arguments.fault_budget in (None, arguments.max_num_batched_tokens)
        self.fault: str = arguments.fault if hit else "none"
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.work = asyncio.Event()
        self.num_iterations = self.num_tokens = self.num_open = self.most_open = 0
        self.num_requests = 0

    async def serve_forever(self) -> None:
        """Listen, and iterate for ever."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.arguments.port, backlog=4096)
        print(f"listening on {self.arguments.port}", flush=True)
        async with server:
            await self._iterate()

    async def _iterate(self) -> None:
        while True:
            await self.work.wait()
            held = self.num_requests > self.arguments.fault_after and self.most_open < self.arguments.hold_until
            if held or not (self.running or self.waiting):
                self.work.clear()
                continue
            while self.waiting and len(self.running) < self.arguments.max_num_seqs:
                self.running.append(self.waiting.pop(0))
            decoding = [job for job in self.running if job.num_prefilled == job.prompt_tokens]
            left = self.arguments.max_num_batched_tokens - len(decoding)
            num_tokens = len(decoding)
            emitting = decoding
            for job in [job for job in self.running if job.num_prefilled < job.prompt_tokens]:
                chunk = min(left, job.prompt_tokens - job.num_prefilled)
                job.num_prefilled += chunk
                left -= chunk
                num_tokens += chunk
                if job.num_prefilled == job.prompt_tokens:
                    emitting = [*emitting, job]
            self.num_iterations += 1
            self.num_tokens += num_tokens
            await asyncio.sleep((self.arguments.base_ms + self.arguments.token_ms * num_tokens) / 1e3)
            for job in emitting:
                job.num_generated += 1
                job.out.put_nowait(job.num_generated)
            self.running = [job for job in self.running if job.num_generated < job.output_tokens]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *headers = head.split("\r\n")
                lengths = [h.split(":")[1] for h in headers if h.lower().startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                await self._answer(line.split(" ")[1], body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            _reply(writer, 503 if self.fault == "never-healthy" else self.arguments.health_status, b"")
        elif path == "/v1/models":
            _reply(writer, 200, json.dumps({"data": [{"id": "fake"}]}).encode())
        elif path == "/metrics" and not self.arguments.no_metrics:
            _reply(writer, 200, self._metrics().encode())
        elif path == "/v1/completions":
            await self._complete(json.loads(body), writer)
        else:
            _reply(writer, 404, b"no such page")

    def _metrics(self) -> str:
        return (
            "# TYPE vllm:num_preemptions_total counter\n"
            'vllm:num_preemptions_total{engine="0",model_name="fake"} 3.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {min(1.0, len(self.running) / 8)}\n'
            f'vllm:iteration_tokens_total_sum{{engine="0"}} {self.num_tokens}\n'
            f'vllm:iteration_tokens_total_count{{engine="0"}} {self.num_iterations}\n'
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="512"} 1.0\n'
        )

    async def _complete(self, asked: dict[str, object], writer: asyncio.StreamWriter) -> None:
        self.num_requests += 1
        fault = self.fault if self.num_requests > self.arguments.fault_after else "none"
        if fault == "error-500":
            _reply(writer, 500, b'{"error": "out of memory"}')
            return
        prompt, output_tokens = asked["prompt"], asked["max_tokens"]
        assert isinstance(output_tokens, int)
        assert asked.get("min_tokens", output_tokens) == output_tokens
        assert asked["ignore_eos"] is True
        words = prompt if isinstance(prompt, list) else str(prompt).split()
        job = Job(len(words), output_tokens - (fault == "short"))
        self.waiting.append(job)
        self.work.set()
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = 0
        while sent < job.output_tokens:
            count = await job.out.get()
            if count % self.arguments.tokens_per_event and count < job.output_tokens:
                continue
            if sent and fault == "die":
                print("out of memory, aborting", flush=True)
                os._exit(9)
            if sent and fault == "stall":
                await asyncio.sleep(3600)
            if sent and fault == "stream-error":
                _event(writer, {"error": {"message": "the engine is dead"}})
                break
            event: dict[str, object] = {"choices": [{"index": 0, "text": "x" * (count - sent), "finish_reason": None}]}
            if not self.arguments.no_usage:
                event["usage"] = {"completion_tokens": count}
            _event(writer, event)
            sent = count
        if not self.arguments.no_usage:
            _event(writer, {"choices": [], "usage": {"completion_tokens": sent}})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        self.num_open -= 1


def _event(writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _reply(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """The options of the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-batched-tokens", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--base-ms", type=float, default=1.0)
    parser.add_argument("--token-ms", type=float, default=0.02)
    parser.add_argument("--tokens-per-event", type=int, default=1)
    parser.add_argument("--health-status", type=int, default=200)
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--no-metrics", action="store_true")
    parser.add_argument("--hold-until", type=int, default=0, help="no iteration before so many streams are open")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--fault-after", type=int, default=0)
    parser.add_argument("--fault-budget", type=int)
    return parser.parse_args(words)


def main() -> None:
    """The program."""
    server = FakeServer(parse_arguments(sys.argv[1:]))
    if server.fault == "exit":
        print("no such model", flush=True)
        sys.exit(3)
    asyncio.run(server.serve_forever())


if __name__ == "__main__":
    main()
