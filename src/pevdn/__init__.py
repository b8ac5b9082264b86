"""Train teams of cooperating agents without pooling their data.

>>> import pevdn
>>> run = pevdn.train("pe-vdn-b", env="toy:two-step", steps=2000)   # doctest: +SKIP
>>> policy = pevdn.load(run)                                        # doctest: +SKIP

Importing this package is cheap: JAX is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pevdn._platform import (
    guard_against_deadlock,
    silence_false_alarms,
    use_one_thread_on_few_cores,
)

if TYPE_CHECKING:
    from pevdn.errors import PevdnError, UsageError
    from pevdn.policies.export import export
    from pevdn.policies.party import load_agent
    from pevdn.policies.policy import Policy, load
    from pevdn.policies.publish import publish
    from pevdn.reproduction import reproduce
    from pevdn.training.directory import Run
    from pevdn.training.forget import forget
    from pevdn.training.loop import resume, train
    from pevdn.training.search import search
    from pevdn.viewer import replay
    from pevdn.worlds.checks import check_env

__version__ = "0.1.0"
__all__ = [
    "PevdnError",
    "Policy",
    "Run",
    "UsageError",
    "__version__",
    "check_env",
    "export",
    "forget",
    "load",
    "load_agent",
    "publish",
    "replay",
    "reproduce",
    "resume",
    "search",
    "train",
]

guard_against_deadlock()
use_one_thread_on_few_cores()
silence_false_alarms()

_HOME = {
    "train": "pevdn.training.loop",
    "resume": "pevdn.training.loop",
    "search": "pevdn.training.search",
    "Run": "pevdn.training.directory",
    "reproduce": "pevdn.reproduction",
    "replay": "pevdn.viewer",
    "load": "pevdn.policies.policy",
    "export": "pevdn.policies.export",
    "publish": "pevdn.policies.publish",
    "forget": "pevdn.training.forget",
    "load_agent": "pevdn.policies.party",
    "check_env": "pevdn.worlds.checks",
    "Policy": "pevdn.policies.policy",
    "PevdnError": "pevdn.errors",
    "UsageError": "pevdn.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pevdn' has no attribute '{name}'")
