"""Block-local learning against methods of full replicas: quality, bytes and memory, on the same tokens.

    python -m benchmarks.methods --data ../shared/data/wikitext-2.tar.xz --jobs 2

Six machines: two a block for blocktrain, six full replicas for FedAvg, Local SGD and DiLoCo, one of them for
end to end. Every layer of every model is trained on the same tokens in all. Rounds are of 5 steps, so that
full replicas, each of which sees a sixth of the tokens, are averaged a dozen times.
"""

from __future__ import annotations

from typing import Any

from benchmarks.arms import Arm, dots, options, play, row, small_run, spread
from benchmarks.report import RESULTS, write_result

TOKENS = 737_280
REPLICAS = 2
LOCAL_STEPS = 5


def main() -> None:
    from spheroid_node.simulate.costs import cost_of
    from spheroid_node.simulate.methods import METHODS, common_tokens

    asked = options(__doc__)
    run = small_run(TOKENS, replicas=REPLICAS, local_steps=LOCAL_STEPS)
    tokens = common_tokens(run, REPLICAS * run.model.blocks, TOKENS)
    run = small_run(tokens, replicas=REPLICAS, local_steps=LOCAL_STEPS)
    names = ("blocktrain", "fedavg", "local-sgd", "diloco", "end-to-end", "one-block")
    arms = {name: Arm(name, run, tokens, method=name, replicas=REPLICAS) for name in names}
    results = play("methods", list(arms.values()), asked)
    rows: list[dict[str, Any]] = []
    headline: dict[str, float] = {}
    for name, arm in arms.items():
        cost = cost_of(run, METHODS[name], "cpu")
        moved = spread(results[name], "bytes_a_worker")[0]
        found = row(
            name,
            results[name],
            bytes_a_worker=round(moved),
            state_mb=round(cost.worst.state_bytes / 1e6, 2),
            activations_mb=round(cost.worst.activation_bytes / 1e6, 2),
            flops_a_token=round(cost.mean.flops),
            flops_total=cost.total_flops(arm.tokens),
        )
        rows.append(found)
        key = name.replace("-", "_")
        headline |= {
            f"{key}_ce": found["ce"],
            f"{key}_bytes": round(moved),
            f"{key}_state_mb": found["state_mb"],
        }
    dots(RESULTS / "methods.png", f"Six machines, {tokens / 1e6:.2f} M tokens a layer", rows)
    write_result("methods", asked.seeds, rows, headline)


if __name__ == "__main__":
    main()
