"""A study on its storage: what it is about, who leads it, and whether its search is over."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna

from ...engine import Workload
from ...engine.server.engine import Target
from ..config import TuneConfig
from ..environment import mask_passwords
from ..problem import DeviceFacts
from .file_lock import LockedError
from .holder import Holder
from .pause import Pause
from .sampler import DIRECTIONS
from .storages import StorageError, is_there, open_storage, patiently
from .trial_queue import BEAT_S, GRACE_S, TrialQueue

_log = logging.getLogger(__name__)

STUDY_NAME = "tilebudget"

#: What of an executor's description a worker's must share with the study's: its times are compared.
DEVICE_FIELDS = ("device", "device_name", "kind", "model", "dtype", "tensor_parallel")


class StoredStudy:
    """An Optuna study and the facts about it that every process needs, kept as its user attributes.

    ``identity`` are the settings that give the study its meaning. Raises ValueError, naming the setting, when the
    storage holds a study of this name with other ones.
    """

    def __init__(self, storage: str | Path, name: str, identity: Mapping[str, str | int | float | None]) -> None:
        self._connect(storage, name)
        study = patiently(
            self.where,
            lambda: optuna.create_study(
                study_name=name, storage=self._storage, directions=DIRECTIONS, load_if_exists=True
            ),
        )
        self._study = study
        self._check_identity(identity)

    @classmethod
    def join(
        cls,
        storage: str | Path,
        name: str,
        *,
        wait_limit_s: float,
        on_wait: Callable[[str], None] = lambda what: None,
    ) -> StoredStudy:
        """The study of this name once it is there and ready to be worked on; StorageError after ``wait_limit_s``.

        ``on_wait`` is told once that it is not there yet. A journal file is never begun here.
        """
        joined, where = cls.__new__(cls), mask_passwords(str(storage))
        until_s = time.monotonic() + wait_limit_s
        pause, connected, told = Pause(), False, False
        while True:
            if not connected and is_there(storage):
                joined._connect(storage, name)
                connected = True
            if connected and (study := patiently(where, joined._find)) is not None:
                joined._study = study
                return joined
            if time.monotonic() > until_s:
                raise StorageError(
                    f"{where}: no study {name!r} was begun there within {wait_limit_s:.0f} s; "
                    "`tilebudget tune --storage` begins one"
                )
            if not told:
                on_wait(f"waiting up to {wait_limit_s:.0f} s for study {name!r} in {where}")
                told = True
            pause()

    def queue(self, variance_metric: str, *, beat_s: float = BEAT_S, grace_s: float = GRACE_S) -> TrialQueue:
        """The trials of the study."""
        return TrialQueue(
            self._study,
            self._storage,
            name=self.where,
            variance_metric=variance_metric,
            beat_s=beat_s,
            grace_s=grace_s,
        )

    def read_facts(self) -> DeviceFacts | None:
        """What was read off the device when the study began; None while that has not been written."""
        setting = self._setting()
        return None if setting is None else DeviceFacts.from_json(setting["facts"])

    def write_setting(
        self, config: TuneConfig | None, facts: DeviceFacts, workload: Workload, executor: Target
    ) -> None:
        """Keep what a worker needs to know. ``config`` is None where no settings can name executor and workload."""
        setting = {
            "config": None if config is None else config.to_json(),
            "facts": facts.to_json(),
            "workload": workload_digest(workload),
            "device": _device(executor),
        }
        self._set("setting", json.dumps(setting))

    def read_config(self) -> TuneConfig:
        """The settings of the study. Raises ValueError when they cannot name what a program gave it."""
        setting = self._setting() or {}
        if setting.get("config") is None:
            raise ValueError(
                f"study={self.name!r}: was begun by a program with an executor or a workload of its own, "
                "which no other process can know; give its settings instead"
            )
        return TuneConfig.from_json(setting["config"])

    def check_same(self, workload: Workload, executor: Target) -> None:
        """Raise ValueError unless this process has the study's requests and the study's device."""
        setting = self._setting() or {}
        if workload_digest(workload) != setting["workload"]:
            raise ValueError(
                f"trace={workload.source or workload.name!r}: holds other requests than the study's; name its file"
            )
        mine, wanted = _device(executor), setting["device"]
        if mine != wanted:
            differing = ", ".join(
                f"{name} is {mine.get(name)!r}, the study's {wanted.get(name)!r}"
                for name in DEVICE_FIELDS
                if mine.get(name) != wanted.get(name)
            )
            raise ValueError(f"device={mine.get('device')!r}: times of another device cannot be compared: {differing}")

    @property
    def is_over(self) -> bool:
        """Whether the search has ended, so that workers may leave."""
        return bool(self._attrs().get("is_over"))

    @contextmanager
    def leading(self, *, beat_s: float = BEAT_S, grace_s: float = GRACE_S) -> Iterator[None]:
        """Within it, this process is the one that proposes; the search is over when it is left without an exception.

        Raises LockedError, with the leader's name, when there is one already. One of this machine that has ended is
        replaced at once, one elsewhere after it gave no sign of life for ``grace_s``.
        """
        self._depose(grace_s)
        self._set("leader", json.dumps({**Holder.here().to_json(), "beat": 0}))
        self._set("is_over", False)
        stop = threading.Event()
        thread = threading.Thread(target=self._beat, args=(stop, beat_s), daemon=True)
        thread.start()
        try:
            yield
            self._set("is_over", True)
        finally:
            stop.set()
            thread.join()
            self._set("leader", None)

    def _connect(self, storage: str | Path, name: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.name = name
        self.where = mask_passwords(str(storage))
        self._storage = patiently(self.where, lambda: open_storage(storage))

    def _find(self) -> optuna.Study | None:
        try:
            study = optuna.load_study(study_name=self.name, storage=self._storage)
        except KeyError:
            return None
        return study if "setting" in study.user_attrs else None

    def _depose(self, grace_s: float) -> None:
        """Make sure that nobody leads the study."""
        text = self._attrs().get("leader")
        leader = None if text is None else Holder.from_json(json.loads(text))
        if leader is None or leader.gone:
            return
        here = Holder.here()
        if leader == here:
            return
        until_s = time.monotonic() + grace_s
        if leader.machine != here.machine:
            _log.warning("study %s is led by %s; waiting %.0f s for a sign of life", self.name, leader, grace_s)
            while time.monotonic() < until_s and self._attrs().get("leader") == text:
                time.sleep(min(1.0, grace_s / 10))
            if self._attrs().get("leader") in (text, None):
                return
        raise LockedError(f"study {self.name} on {self.where} is led by {leader}; wait for it, or give another --study")

    def _beat(self, stop: threading.Event, beat_s: float) -> None:
        beat = 0
        while not stop.wait(beat_s):
            beat += 1
            try:
                self._study.set_user_attr("leader", json.dumps({**Holder.here().to_json(), "beat": beat}))
            except Exception as error:  # the search itself meets it, and says so
                _log.debug("heartbeat of study %s: %s", self.name, error)

    def _setting(self) -> dict[str, Any] | None:
        text = self._attrs().get("setting")
        return None if text is None else json.loads(text)

    def _attrs(self) -> dict[str, Any]:
        return patiently(self.where, lambda: self._study.user_attrs)

    def _set(self, name: str, value: str | bool | dict[str, Any] | None) -> None:
        patiently(self.where, lambda: self._study.set_user_attr(name, value))

    def _check_identity(self, identity: Mapping[str, str | int | float | None]) -> None:
        stored = self._attrs().get("identity")
        if stored is None:
            self._set("identity", dict(identity))
            return
        for name, value in identity.items():
            if stored.get(name) != value:
                raise ValueError(
                    f"{name}={value!r}: the study to resume was started with {name}={stored.get(name)!r}; "
                    "use the same setting or another run folder"
                )


def workload_digest(workload: Workload) -> str:
    """A fingerprint of the requests: two workloads with the same one are the same work."""
    digest = hashlib.sha256()
    for request in workload.requests:
        digest.update(f"{request.arrival_s!r},{request.prompt_tokens},{request.output_tokens};".encode())
    return digest.hexdigest()


def _device(executor: Target) -> dict[str, str | int | float]:
    described = executor.describe()
    return {name: described[name] for name in DEVICE_FIELDS if name in described}
