"""The package boundary is the privacy boundary: no function of agent/ sees a team."""

import importlib
import inspect
import pkgutil

import pytest

import pevdn.agent

MODULES = [module.name for module in pkgutil.iter_modules(pevdn.agent.__path__, "pevdn.agent.")]
FORBIDDEN = [f"pevdn.{p}" for p in ("exchange", "simulation", "network", "training", "privacy")]


@pytest.mark.parametrize("name", MODULES)
def test_no_agent_function_knows_of_a_team(name):
    """No module of agent/ imports code that joins agents, or takes more than one agent's data."""
    module = importlib.import_module(name)
    source = inspect.getsource(module)
    for package in FORBIDDEN:
        assert package not in source
    assert "pevdn.worlds" not in source.replace("pevdn.worlds.interface", "")
    if name == "pevdn.agent.keys":  # it derives the keys of all agents, and sees no data
        return
    for function_name, function in inspect.getmembers(module, inspect.isfunction):
        parameters = inspect.signature(function).parameters
        assert not {"n_agents", "agents", "team", "teammates"} & set(parameters), function_name
