"""What hostile workers do to a run, by the rule that combines updates.

    python -m benchmarks.hostile --data ../shared/data/wikitext-2.tar.xz --jobs 2

Six workers train one block in lockstep; one or two of them hand in something else than what they learnt
(simulate/hostile.py). Updates that are not finite or stale are refused before any rule is asked, so these are
played under the default rule alone.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.arms import Arm, options, play, row, small_run
from benchmarks.report import RESULTS, write_result
from spheroid_node.run import ModelSpec

WORKERS = 6
LOCAL_STEPS = 10
ROUNDS = 16
MODEL = ModelSpec(blocks=1, layers=2, width=64, heads=4, window=64)
RULES = ("mean", "clipped", "trimmed-mean", "median")
SCREENED = "clipped and screen"
SCREEN = {"screen": 0.05, "clip_factor": 1.5}
"""Of SCREENED: nats a byte by which an update may make the model worse, and how long it may be."""
ATTACKS = ("flipped", "scaled", "random")
REFUSED = ("nan", "stale")
TOP = 3.0
"""Of the figure, nats a byte."""


def arm(rule: str, attack: str = "", hostile: int = 0) -> Arm:
    tokens = ROUNDS * WORKERS * LOCAL_STEPS * 16 * MODEL.window
    run = small_run(
        tokens,
        replicas=WORKERS,
        local_steps=LOCAL_STEPS,
        model=MODEL,
        round={"aggregation": "clipped" if rule == SCREENED else rule, "trim": 0.34},
    )
    if rule == SCREENED:
        screened = run.round.model_copy(update=SCREEN)
        run = run.model_copy(update={"round": screened})
    name = f"{rule}, {hostile} {attack}" if hostile else f"{rule}, honest"
    return Arm(name, run, tokens, replicas=WORKERS, attack=attack, hostile=hostile)


def cases() -> list[tuple[str, str, int]]:
    rules = (*RULES, SCREENED)
    found = [(rule, "", 0) for rule in rules]
    found += [(rule, attack, count) for attack in ATTACKS for count in (1, 2) for rule in rules]
    return found + [("clipped", attack, count) for attack in REFUSED for count in (1, 2)]


def figure(rows: list[dict[str, Any]]) -> None:
    """CE of every rule under every attack; what is off the scale stands at its upper end with its figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [f"{count} {attack}" for attack in ATTACKS for count in (1, 2)]
    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for rule in (*RULES, SCREENED):
        ce = [next(r["ce"] for r in rows if r["arm"] == f"{rule}, {kind}") for kind in kinds]
        axes.plot(kinds, [min(value, TOP) for value in ce], marker="o", label=rule)
        for kind, value in zip(kinds, ce, strict=True):
            if value > TOP:
                axes.annotate(f"{rule}: {value:,.0f}", (kind, TOP), (8, -4), textcoords="offset points")
    axes.axhline(next(r["ce"] for r in rows if r["arm"] == "mean, honest"), color="grey", linestyle=":")
    axes.set_ylabel("cross-entropy on held-out text, nats a byte")
    axes.set_title("Of six workers, these are hostile")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / "hostile.png", dpi=130)
    pyplot.close(figure)


def main() -> None:
    asked = options(__doc__)
    asked = argparse.Namespace(**{**vars(asked), "seeds": asked.seeds[:1]})
    results = play("hostile", [arm(*case) for case in cases()], asked)
    rows = []
    for rule, attack, hostile in cases():
        name = arm(rule, attack, hostile).name
        honest = results[f"{rule}, honest"][0]["ce"]
        delta = results[name][0]["ce"] - honest
        rows.append(
            row(name, results[name], rule=rule, attack=attack, hostile=hostile, delta=round(delta, 4))
        )
    worst = {
        (rule, hostile): max(r["delta"] for r in rows if (r["rule"], r["hostile"]) == (rule, hostile))
        for rule in (*RULES, SCREENED)
        for hostile in (1, 2)
    }
    headline = {
        f"{rule.replace('-', '_').replace(' ', '_')}_{hostile}of6_delta": delta
        for (rule, hostile), delta in worst.items()
    }
    figure(rows)
    write_result("hostile", asked.seeds, rows, headline)


if __name__ == "__main__":
    main()
