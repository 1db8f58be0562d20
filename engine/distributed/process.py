"""A stage process: joins the others, loads its part of the model, and serves the driver until that is gone.

Started by the driver as ``python -m tilebudget.engine.distributed.process`` with a ``Meeting`` on its standard input,
or by ``torchrun``, which runs the driver's program once for every rank (``launch.serve_torchrun_rank``).
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections import deque
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from time import perf_counter, sleep
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..device import resolve_dtype
from .messages import (
    STAGE_TIMEOUT_S,
    AskClock,
    AskMemory,
    Begin,
    Begun,
    Clock,
    Done,
    Failed,
    Hello,
    Meeting,
    MicroBatch,
    PeerLostError,
    Ready,
    Setup,
    Stop,
    connect,
    host_id,
)
from .stage import Stage
from .tensor_parallel import TensorGroup


class _Arrival:
    """The hidden states of a micro-batch on their way from the stage before."""

    def __init__(self, buffer: Tensor, source: int, number: int) -> None:
        self._buffer = buffer
        self._work = dist.irecv(buffer, source, tag=number)

    def wait(self) -> Tensor:
        """The hidden states, here."""
        assert self._work is not None
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error
        return self._buffer


class StageProcess:
    """Serves one driver over ``control``."""

    def __init__(self, control: Connection, rank: int, local_rank: int) -> None:
        self._control = control
        self._rank = rank
        self._local_rank = local_rank
        self._host = host_id()
        self._inbox: SimpleQueue[tuple[object, _Arrival | None]] = SimpleQueue()
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def serve(self, store: Store) -> None:
        """Introduce itself, set up, and answer until told to stop. An error is told and ends the process."""
        self._control.send(Hello(rank=self._rank, pid=os.getpid(), host=self._host, host_name=platform.node()))
        Thread(target=self._read, daemon=True).start()
        try:
            while True:
                message, arrival = self._inbox.get()
                if isinstance(message, Stop):
                    break
                if isinstance(message, Setup):
                    self._set_up(message, store)
                else:
                    self._answer(message, arrival)
        except Exception as error:  # whatever it is, the driver must hear of it
            by_peer = isinstance(error, PeerLostError)
            self._control.send(Failed(kind=type(error).__name__, message=str(error), by_peer=by_peer))
            sleep(STAGE_TIMEOUT_S)  # the driver hangs up once it has read that, which ends the process
            os._exit(1)

    def _set_up(self, setup: Setup, store: Store) -> None:
        partition, rank = setup.partition, self._rank
        device = torch.device("cpu")
        if setup.device == "cuda":
            if self._local_rank >= torch.cuda.device_count():
                raise ValueError(
                    f"device='cuda': {platform.node()} has {torch.cuda.device_count()} CUDA devices, its stage "
                    f"processes need one each and this is number {self._local_rank + 1}"
                )
            device = torch.device("cuda", self._local_rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if setup.device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=partition.num_ranks,
            timeout=timedelta(seconds=STAGE_TIMEOUT_S),
        )
        part = partition.part(rank)
        group = None
        degree = partition.tensor_parallel
        if degree > 1:
            for stage in range(partition.num_stages):
                # Every process must make every group, in the same order.
                made = dist.new_group(list(range(stage * degree, (stage + 1) * degree)))
                if stage == partition.stage_of(rank):
                    group = TensorGroup(made, part.slice_of(partition.config.vocab_size)[0])
        self._partition = partition
        self._dtype = resolve_dtype(setup.dtype)
        self._stage = Stage(setup, part, device, group)
        self._control.send(Ready(described=self._stage.describe()))

    def _read(self) -> None:
        """Take messages in as they come, in a thread of its own: hidden states of the next micro-batch then travel
        while this one is computed, and the end of the driver is noticed whatever the process is waiting for."""
        try:
            while True:
                message = self._control.recv()
                arrival = None
                if isinstance(message, MicroBatch) and self._stage.device.type == "cpu":
                    arrival = self._expect(message)
                self._inbox.put((message, arrival))
                if isinstance(message, Stop):
                    return
        except (EOFError, OSError):
            os._exit(1)

    def _expect(self, micro_batch: MicroBatch) -> _Arrival | None:
        """Ask for the hidden states of ``micro_batch``; None in the first stage."""
        if self._stage.part.is_first:
            return None
        shape = (len(micro_batch.rows.token_ids), self._stage.model.config.hidden_size)
        buffer = torch.empty(shape, dtype=self._dtype, device=self._stage.device)
        return _Arrival(buffer, self._rank - self._partition.tensor_parallel, micro_batch.number)

    def _answer(self, message: object, arrival: _Arrival | None) -> None:
        """Do what a message asks."""
        match message:
            case MicroBatch():
                self._run(message, arrival)
            case Begin():
                self._stage.begin(message)
                self._control.send(Begun())
            case AskMemory():
                self._control.send(self._stage.memory(self._host, message.block_size))
            case AskClock():
                self._control.send(Clock(now_s=perf_counter()))
            case _:
                raise AssertionError(f"no stage knows the message {type(message).__name__}")

    def _run(self, micro_batch: MicroBatch, arrival: _Arrival | None) -> None:
        stage = self._stage
        step = micro_batch.rows.to(stage.device)
        if stage.device.type == "cuda":
            # On CUDA a receive occupies the device until it is served, so it is not asked for ahead of time.
            arrival = self._expect(micro_batch)
        hidden = None if arrival is None else arrival.wait()
        result = stage.run(step, hidden)
        if not stage.part.is_last:
            self._send_on(result.output, micro_batch.number)
        if stage.part.rank == 0:
            token_ids = result.output.numpy().astype(np.int64).tobytes() if stage.part.is_last else None
            done = Done(number=micro_batch.number, start_s=result.start_s, end_s=result.end_s, token_ids=token_ids)
            self._control.send(done)

    def _send_on(self, hidden: Tensor, number: int) -> None:
        """Send hidden states to the next stage, without waiting until they are taken. They must live until then, and
        are sure to have been taken when as many micro-batches as fit into the pipeline have followed."""
        try:
            if len(self._sends) > self._partition.num_stages:
                self._sends.popleft()[0].wait()
            work = dist.isend(hidden, self._rank + self._partition.tensor_parallel, tag=number)
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error
        assert work is not None
        self._sends.append((work, hidden))


def serve(meeting: Meeting, *, rank: int, local_rank: int) -> NoReturn:
    """Be stage process ``rank`` of those that meet at ``meeting``, the ``local_rank``-th of this host. The process ends
    when the driver is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's; it ends the stages
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # results are the driver's alone to print
    if meeting.driver_host == "127.0.0.1":
        # One host: gloo would look for the address of the host's name, which need not resolve.
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    store = TCPStore(
        meeting.store_host, meeting.store_port, is_master=False, timeout=timedelta(seconds=STAGE_TIMEOUT_S)
    )
    control = connect(meeting)
    StageProcess(control, rank, local_rank).serve(PrefixStore(meeting.prefix, store))
    os._exit(0)  # nothing is in flight and nothing to be saved: taking torch apart takes seconds


def main() -> None:
    """Serve as the JSON object on standard input says: ``meeting``, ``rank`` and ``local_rank``."""
    given = json.loads(sys.stdin.readline())
    serve(Meeting(**given["meeting"]), rank=given["rank"], local_rank=given["local_rank"])


if __name__ == "__main__":
    main()
