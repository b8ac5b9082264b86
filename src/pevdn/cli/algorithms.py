"""`pevdn algorithms`: list the algorithms."""

from __future__ import annotations

from pevdn.cli.output import Json, print_json, print_table


def main(as_json: Json = False) -> None:
    """List the algorithms: how the team's sum is formed, and what agents send each other."""
    from pevdn.config.algorithms import ALGORITHMS

    if as_json:
        print_json(
            [
                {
                    "name": a.name,
                    "exchange": a.exchange,
                    "differentially_private": a.private,
                    "crosses": a.crosses,
                    "defaults": dict(a.defaults),
                }
                for a in ALGORITHMS.values()
            ]
        )
        return
    print_table(
        ["algorithm", "exchange", "DP", "what agents send each other"],
        [
            [a.name, a.exchange, "yes" if a.private else "no", a.crosses]
            for a in ALGORITHMS.values()
        ],
    )
