"""The tests of pevdn.network need the extra `network`; without it they are not collected."""

import importlib.util

if all(importlib.util.find_spec(name) for name in ("cryptography", "grpc", "prometheus_client")):
    from network_fixtures import heard, one_salt, pristine, shared_programs, team, three  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]
