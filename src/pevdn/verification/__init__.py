"""Tests of the privacy claims on trained runs: audit, attacks, data-flow analysis."""
