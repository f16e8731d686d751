"""The benchmarks are run by hand; here they are only kept from rotting."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import aggregation, arms, logical, tables
from benchmarks.arms import Arm, row, small_run
from spheroid_node.run import ModelSpec
from spheroid_node.wire.tensors import decode_vector

SCRIPTS = sorted(path.stem for path in Path(arms.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_can_be_imported(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.__doc__


def test_the_small_run_decays_over_the_tokens_of_an_arm() -> None:
    alone, two = small_run(2_048_000), small_run(2_048_000, replicas=2)
    steps = 2_048_000 // (16 * 128)
    assert alone.training.decay_steps == steps - alone.training.warmup_steps
    assert two.training.decay_steps == steps // 2 - two.training.warmup_steps


def test_changes_are_to_the_sections_they_name() -> None:
    run = small_run(204_800, model={"blocks": 6, "layers": 1}, learning={"denoiser": "edm"})
    assert (run.model.blocks, run.model.layers, run.model.width) == (6, 1, 128)
    assert (run.learning.denoiser, run.learning.conditioning) == ("edm", "chain")


def test_an_arm_is_played_again_once_it_has_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arms, "RAW", tmp_path)
    arm = Arm("two words, one arm", small_run(204_800), 204_800)
    path = arms._path("table", arm, 1)
    path.parent.mkdir()
    path.write_text(json.dumps({"key": arm.key(1), "ce": 2.0}))
    assert path.name == "two-words-one-arm-1.json"
    assert arms._kept("table", arm, 1) == {"key": arm.key(1), "ce": 2.0}
    assert arms._kept("table", arm, 2) is None
    for other in (
        Arm(arm.name, small_run(409_600), 204_800),
        Arm(arm.name, arm.run, 409_600),
        Arm(arm.name, arm.run, 204_800, regime="mild"),
        Arm(arm.name, arm.run, 204_800, method="fedavg"),
        Arm(arm.name, arm.run, 204_800, replicas=2),
        Arm(arm.name, arm.run, 204_800, attack="flipped", hostile=1),
    ):
        assert arms._kept("table", other, 1) is None


def test_a_row_has_the_mean_and_the_deviation() -> None:
    results = [
        {"ce": ce, "ce_by_block": [2.0, ce], "ce_mean_log_probs": ce, "ce_last_two": ce, "tokens": 8.0}
        for ce in (1.0, 2.0, 3.0)
    ]
    made = row("arm", results, more=1)
    assert (made["ce"], made["ce_sd"], made["ce_by_block"], made["seeds"]) == (2.0, 1.0, [2.0, 2.0], 3)
    assert (made["arm"], made["more"]) == ("arm", 1)


def test_a_logical_shape_is_measured_and_drawn(tmp_path: Path) -> None:
    model = ModelSpec(blocks=2, layers=1, width=64, heads=1, window=1024)
    rows = [logical.measure(model, positions, seconds=0.0) for positions in (1, 30)]
    assert [(row["width"], row["positions"], len(row["seconds"])) for row in rows] == [
        (64, 1, 2),
        (64, 30, 2),
    ]
    figures = logical.headline(rows)
    assert set(figures) == {
        "sweeps_per_s",
        "mb_per_s",
        "sweeps_per_s_of_30",
        "mb_per_s_of_30",
        "largest_params_b",
    }
    assert figures["sweeps_per_s"] == {"64": pytest.approx(rows[0]["sweeps_per_s"], abs=1e-4)}
    logical.draw(tmp_path / "logical.png", rows)
    assert (tmp_path / "logical.png").stat().st_size > 10_000
    cells = [column(rows[1]) for column in tables.TABLES["logical"].values()]
    assert cells[0] == "64" and cells[3] == "30" and cells[5].endswith(" MB/s")


def test_the_largest_logical_shape_is_that_of_the_paper() -> None:
    assert logical.total_elements(logical.RunSpec(name="x", model=logical.shape(18432))) == pytest.approx(
        75.8e9, rel=0.01
    )


@pytest.mark.parametrize("rule", ["clipped", "median"])
def test_updates_are_added_up_by_the_path_of_a_node(rule: aggregation.Rule, tmp_path: Path) -> None:
    found = aggregation.aggregate("int8", rule, 3, 400_000, str(tmp_path))
    assert found.keys() == {"seconds", "close_seconds", "peak_mb"}
    assert found["seconds"] >= found["close_seconds"] > 0
    assert aggregation.numpy_mean("int8", rule, 3, 10_000, "")["seconds"] > 0


@pytest.mark.parametrize("dtype", ["fp16", "int8", "float32"])
def test_numpy_alone_reads_a_payload_as_we_do(dtype: aggregation.Dtype) -> None:
    payload = aggregation.payload_of(10_000, dtype)
    assert aggregation.decoded(payload, dtype).tolist() == decode_vector(payload, dtype).tolist()


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0 ms"), (0.0012345, "0.00123 ms"), (1.5, "1.50 ms"), (99.96, "100.0 ms"), (12_345.6, "12,346 ms")],
)
def test_at_least_three_digits(value: float, said: str) -> None:
    assert tables.measured("x", "ms")({"x": value}) == said


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page) == page
    assert {name for _, name, _ in tables.MARKED.findall(page)} <= set(tables.TABLES)


def test_a_table_that_is_not_the_result_is_noticed() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page.replace("tokens/s |", "tokens/h |", 1)) == page
