"""Train a team of cooperating agents without any agent sharing what it saw or did.

>>> import pevdn
>>> run = pevdn.train("pe-vdn-b", env="toy:two-step", steps=2000)   # doctest: +SKIP
>>> policy = pevdn.load(run)                                        # doctest: +SKIP

Importing this package is cheap: JAX is loaded when something needs it.
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
    from pevdn.experiment.directory import Run
    from pevdn.experiment.export import export
    from pevdn.experiment.forget import forget
    from pevdn.experiment.policy import Policy, load
    from pevdn.experiment.publish import publish
    from pevdn.experiment.reproduction import reproduce
    from pevdn.experiment.run import resume, train
    from pevdn.experiment.watching import replay
    from pevdn.runtime.network.trained import load_agent
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
    "train",
]

guard_against_deadlock()
use_one_thread_on_few_cores()
silence_false_alarms()

_HOME = {
    "train": "pevdn.experiment.run",
    "resume": "pevdn.experiment.run",
    "Run": "pevdn.experiment.directory",
    "reproduce": "pevdn.experiment.reproduction",
    "replay": "pevdn.experiment.watching",
    "load": "pevdn.experiment.policy",
    "export": "pevdn.experiment.export",
    "publish": "pevdn.experiment.publish",
    "forget": "pevdn.experiment.forget",
    "load_agent": "pevdn.runtime.network.trained",
    "check_env": "pevdn.worlds.checks",
    "Policy": "pevdn.experiment.policy",
    "PevdnError": "pevdn.errors",
    "UsageError": "pevdn.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pevdn' has no attribute '{name}'")
