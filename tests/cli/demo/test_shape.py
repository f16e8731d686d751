from pathlib import Path

from spheroid_node.cli.demo.shape import demo_run, to_toml
from spheroid_node.run import RunSpec

RUNS = Path(__file__).parents[3] / "bootstrap" / "runs"


def test_the_demo_is_the_run_that_operators_are_shown() -> None:
    shipped = RunSpec.from_toml(RUNS / "demo.toml")
    assert demo_run(shipped.round.genesis) == shipped


def test_a_run_file_reads_back_as_the_same_run(tmp_path: Path) -> None:
    run = demo_run(1_800_000_000.123456)
    (tmp_path / "run.toml").write_text(to_toml(run))
    assert RunSpec.from_toml(tmp_path / "run.toml").run_id == run.run_id
    listed = RunSpec.model_validate(run.model_dump() | {"access": ("x" * 46, "y" * 46)})
    (tmp_path / "listed.toml").write_text(to_toml(listed))
    assert RunSpec.from_toml(tmp_path / "listed.toml") == listed


def test_the_text_names_the_run() -> None:
    assert demo_run(0).data.name == "python-docs"
    assert demo_run(0, ["wikitext-2"]).data.name == "wikitext-2"
    assert demo_run(0, ["a.txt", "b.txt"]).data.name == "your text"
