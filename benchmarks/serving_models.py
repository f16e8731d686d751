"""The models that :mod:`benchmarks.serving` measures with, trained in the simulator on 3 M tokens a block.

    python -m benchmarks.serving_models --data DATA --out DIR

writes DIR/chain (the default recipe), DIR/mean (the same parameters, but the mean of the blocks is read out),
DIR/suffix (the default with ``mask_suffix = 0.25``, for one-sweep) and DIR/whole (a transformer of full depth
trained end to end, which judges texts). ``--only`` makes some of them; mean comes with chain.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.arms import Arm, prepared, small_run, unpack
from spheroid_node.training.checkpoint import export_model

TOKENS = 3_072_000
MASK_SUFFIX = 0.25
MODELS = {
    "chain": Arm("chain", small_run(TOKENS), TOKENS),
    "suffix": Arm("suffix", small_run(TOKENS, training={"mask_suffix": MASK_SUFFIX}), TOKENS),
    "whole": Arm("whole", small_run(TOKENS), TOKENS, method="end-to-end"),
}


def train(name: str, text_folder: Path, output: Path) -> None:
    swarm, rounds = prepared(MODELS[name], 0, text_folder)
    for report in swarm.play(rounds, evaluate_every=rounds):
        if report.ce:
            print(f"{name}: round {report.round}, CE {report.ce_readout:.4f}", flush=True)
    evaluation = asdict(swarm.evaluate())
    measured = {"ce_by_block": evaluation.pop("ce"), "ce": evaluation.pop("ce_readout"), **evaluation}
    parts = swarm.together()
    vectors = {group: version.vector for group, version in parts.items()}
    versions = {group: version.base.version for group, version in parts.items()}
    export_model(output / name, swarm.run, vectors, versions, measured, "trained in the simulator")
    if name == "chain":
        # A block's loss knows nothing of the read-out, so the same parameters serve both.
        run = small_run(TOKENS, learning={"readout": "mean"})
        export_model(output / "mean", run, vectors, versions, None, "trained in the simulator")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="wikitext-2.tar.xz, or a folder with its files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[*MODELS], default=[*MODELS])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = unpack(Path(asked.data), Path(folder))
        for name in asked.only:
            train(name, text, asked.out)


if __name__ == "__main__":
    main()
