"""The batching policies, one file each. A new one is a new file here: a ``Scheduler`` with a ``name``."""

from __future__ import annotations

from collections import deque
from importlib import import_module
from pkgutil import iter_modules

from ..kv_cache import BlockManager
from ..request import Sequence
from ..scheduler import Scheduler, SchedulerSettings


def _policies() -> dict[str, type[Scheduler]]:
    """The class of each module here that has a name of its own, in the order in which the policies came."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    found = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Scheduler) and value.__module__ == module.__name__
    ]
    named = sorted((policy for policy in found if "name" in vars(policy)), key=lambda policy: policy.since)
    return {policy.name: policy for policy in named}


POLICIES = _policies()
POLICY_NAMES = tuple(POLICIES)

#: The policies that the Sarathi-Serve paper compares.
PAPER_POLICIES = tuple(name for name, policy in POLICIES.items() if policy.in_paper)


def make_scheduler(config: SchedulerSettings, kv: BlockManager, waiting: deque[Sequence] | None = None) -> Scheduler:
    """The scheduler of ``config.policy`` over the block manager ``kv``, and over a queue that it may share."""
    return POLICIES[config.policy](config, kv, waiting)
