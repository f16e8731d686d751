"""RunSpec: canonical, named by a stable id, and wrong run files are refused by the key that is wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spheroid_node.errors import NoSuchBlock, RunFileInvalid
from spheroid_node.run import MAX_RUN_BYTES, RunSpec, whole_of

RUNS = Path(__file__).parents[1] / "bootstrap" / "runs"
FIELDS: dict[str, Any] = {
    "name": "golden",
    "model": {"blocks": 3, "layers": 2, "width": 128, "heads": 4, "window": 128},
}
GOOD = """
name = "test"
[model]
blocks = 3
layers = 2
width = 128
heads = 4
window = 128
"""


def spec(**changes: Any) -> RunSpec:
    return RunSpec.model_validate(FIELDS | changes)


def test_the_run_id_is_stable() -> None:
    """A change of this value makes every swarm that exists another swarm."""
    assert spec().run_id == "d50bb4c531eeb486"


def test_the_run_id_does_not_depend_on_the_order_of_fields_or_on_what_is_left_out() -> None:
    written_out = spec().model_dump()
    keys = list(written_out)
    random.Random(0).shuffle(keys)
    assert RunSpec.model_validate({key: written_out[key] for key in keys}).pack() == spec().pack()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"seed": 1},
        {"model": FIELDS["model"] | {"width": 256}},
        {"noise": {"sigma_max": 20.0}},
        {"learning": {"denoiser": "edm"}},
        {"training": {"learning_rate": 1e-3}},
        {"training": {"mask_suffix": 0.25}},
        {"round": {"period": 61.0}},
        {"interface": "frozen"},
        {"data": {"name": "other"}},
        {"access": ["12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"]},
        {"protocol": [1, 2]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_a_swarm_agrees_on_changes_the_run_id(changes: dict[str, Any]) -> None:
    assert spec(**changes).run_id != spec().run_id


@given(
    st.integers(0, 2**63 - 1),
    st.floats(0.01, 5),
    st.lists(st.text("abcdefghij", min_size=40, max_size=64), max_size=5),
    st.sampled_from(["shared", "frozen"]),
)
def test_runs_come_back(seed: int, sigma_min: float, access: list[str], interface: str) -> None:
    run = spec(seed=seed, noise={"sigma_min": sigma_min}, access=access, interface=interface)
    again = RunSpec.unpack(run.pack())
    assert again == run
    assert again.pack() == run.pack()
    assert again.run_id == run.run_id


def test_maps_are_packed_in_the_order_of_their_keys() -> None:
    fields = msgpack.unpackb(spec().pack())
    assert list(fields) == sorted(fields)
    assert list(fields["round"]) == sorted(fields["round"])


@given(st.binary(max_size=200))
def test_random_bytes_are_no_run(packed: bytes) -> None:
    with pytest.raises(ValueError):
        RunSpec.unpack(packed)


@given(st.integers(0), st.integers(0, 255))
def test_mutations_are_runs_or_value_errors(where: int, byte: int) -> None:
    mutated = bytearray(spec().pack())
    mutated[where % len(mutated)] = byte
    try:
        run = RunSpec.unpack(bytes(mutated))
    except ValueError:
        return
    assert RunSpec.unpack(run.pack()) == run


def test_an_oversized_run_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(ValueError, match=str(MAX_RUN_BYTES)):
        RunSpec.unpack(bytes(MAX_RUN_BYTES + 1))


def test_groups() -> None:
    assert spec().groups == ("block-0", "block-1", "block-2", "interface")
    assert spec(interface="frozen").groups == ("block-0", "block-1", "block-2")
    assert spec().worker_groups(1) == ("block-1", "interface")
    assert spec(interface="frozen").worker_groups(1) == ("block-1",)


def test_groups_of_a_run_with_shards() -> None:
    run = spec(round={"shards": 2})
    assert run.wholes == spec().wholes == spec().groups
    cut = [f"{whole}.{number}" for whole in run.wholes for number in range(2)]
    assert list(run.groups) == cut == [f"block-0.{n}" for n in range(2)] + cut[2:]
    assert run.worker_wholes(1) == ("block-1", "interface")
    assert run.worker_groups(1) == ("block-1.0", "block-1.1", "interface.0", "interface.1")
    assert run.copied_groups(1) == {"block-0.0": 0, "block-0.1": 0}
    assert run.lags == spec().lags
    assert {whole_of(group) for group in run.groups} == set(run.wholes)
    frozen = spec(round={"shards": 2}, interface="frozen")
    assert frozen.shards_of("interface") == ("interface",)
    assert run.kept_versions > spec().kept_versions


def test_blocks_outside_the_run_are_named() -> None:
    spec().check_block(2)
    for block in (-1, 3, 7):
        with pytest.raises(NoSuchBlock, match=f"no block {block}.*3 blocks, 0 to 2"):
            spec().check_block(block)


def test_access() -> None:
    peer, other = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB", "1" * 52
    assert spec().allows(other)
    assert spec(access=[peer]).allows(peer)
    assert not spec(access=[peer]).allows(other)


def test_a_run_is_frozen() -> None:
    with pytest.raises(ValidationError):
        spec().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.toml")), ids=lambda path: path.name)
def test_the_run_files_we_ship_load(path: Path) -> None:
    assert RunSpec.from_toml(path).name == path.stem


def test_the_run_files_are_those_of_the_issue() -> None:
    small, paper = (RunSpec.from_toml(RUNS / f"wikitext-{size}.toml") for size in ("small", "paper"))
    assert (small.model.blocks, small.model.layers, small.model.width, small.model.window) == (3, 2, 128, 128)
    assert (paper.model.blocks, paper.model.layers, paper.model.width) == (3, 4, 512)
    assert small.data.sha256 == paper.data.sha256 != ""


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (GOOD + "surplus = 1", r"model\.surplus"),
        ("surplus = 1\n" + GOOD, ": surplus: "),
        (GOOD + "[noise]\nsigma_min = -1.0", r"noise\.sigma_min"),
        (GOOD + "[noise]\nsigma_min = 0", r"noise\.sigma_min"),
        (GOOD + "[noise]\nsigma_max = inf", r"noise\.sigma_max"),
        (GOOD + "[noise]\nsigma_min = 11.0", r"sigma_min \(11\.0\) must be below sigma_max"),
        (GOOD.replace("heads = 4", "heads = 5"), r"heads \(5\) must divide width \(128\)"),
        (GOOD.replace("heads = 4", "heads = 128"), r"width / heads \(1\) must be even"),
        (GOOD.replace("heads = 4", "heads = 0"), r"model\.heads"),
        (GOOD.replace("blocks = 3", ""), r"model\.blocks"),
        (GOOD.replace("blocks = 3", 'blocks = "three"'), r"model\.blocks"),
        (GOOD.replace('name = "test"', ""), ": name: "),
        (GOOD.replace("test", "a/b"), ": name: "),
        (GOOD + "[round]\nsettle = 60.0", r"settle \(60\.0\) must be shorter than period"),
        (GOOD + "[round]\nperiod = nan", r"round\.period"),
        (GOOD + "[training]\nmask_suffix = 1.5", r"training\.mask_suffix"),
        (GOOD + "[training]\nmask_suffix = nan", r"training\.mask_suffix"),
        (GOOD + '[data]\nsha256 = "abc"', r"data\.sha256"),
        (GOOD + '[learning]\ndenoiser = "magic"', r"learning\.denoiser"),
        ("seed = -1\n" + GOOD, ": seed: "),
        ('access = ["me"]\n' + GOOD, ": access"),
        (f"access = {[f'{n:052}' for n in range(400)]}\n" + GOOD, "access: too many peers"),
        (GOOD + "blocks = 4", "overwrite"),
        ("name = [", "at end of document"),
        ("", "name.*model"),
        ("[model]\nheads = 3\nwidth = 4", r"model\.blocks.*model\.layers"),
    ],
)
def test_a_wrong_run_file_is_refused_by_its_key(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RunFileInvalid, match=key) as caught:
        RunSpec.from_toml(path)
    assert caught.value.exit_code == 2
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.toml", tmp_path, tmp_path / "binary.toml"):
        with pytest.raises(RunFileInvalid, match=path.name):
            RunSpec.from_toml(path)


@pytest.mark.parametrize(
    "value",
    ["9" * 30, "9" * 5000, "[" * 3000, '"\\u0000"'],
    ids=["too-large", "too-long", "too-deep", "zero"],
)
@pytest.mark.parametrize("key", ["seed", "training.local_steps", "training.warmup_steps", "model.mlp_ratio"])
def test_numbers_that_nobody_would_think_of_are_refused(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'name = "x"\n{key} = {value}\n{MODEL_KEYS}', encoding="utf-8")
    with pytest.raises(RunFileInvalid):
        RunSpec.from_toml(path)


MODEL_KEYS = "model.blocks = 2\nmodel.layers = 1\nmodel.width = 8\nmodel.heads = 2\nmodel.window = 16\n"


def deep(blocks: int, **changes: Any) -> RunSpec:
    return spec(model={**FIELDS["model"], "blocks": blocks}, **changes)


def test_a_block_lags_by_its_distance_to_the_last() -> None:
    run = deep(4)
    assert [run.lag(block) for block in range(4)] == [3, 2, 1, 0]
    assert run.lags == {"block-0": 3, "block-1": 2, "block-2": 1, "block-3": 0, "interface": 0}
    assert run.kept_versions == 5
    # The newest of the block before makes the next version of the own; what is ahead is never behind.
    assert [run.copy_lag(2, other) for other in range(4)] == [1, 0, 0, 0]


def test_a_chain_that_is_put_together_is_the_one_that_was_trained_on() -> None:
    """If version v of ``own`` is in the chain, so are the copies that made it from version v − 1."""
    run = deep(5)
    newest = 20  # of every block
    in_chain = {block: newest - run.lag(block) for block in range(5)}
    for own in range(5):
        newest_then = in_chain[own] - 1  # every block's, when training for the own version began
        for other in run.upstream_blocks(own):
            assert newest_then - run.copy_lag(own, other) == in_chain[other]


@pytest.mark.parametrize("learning", [{"staggered": False}, {"conditioning": "context"}])
def test_without_staggering_nothing_lags(learning: dict[str, object]) -> None:
    run = deep(4, learning=learning)
    assert set(run.lags.values()) == {0}
    assert run.copy_lag(3, 0) == 0
    assert run.kept_versions == 2


def test_a_changed_copy_is_another_run() -> None:
    run = spec()
    before = run.run_id
    copy = run.model_copy(update={"seed": 5})
    assert copy.run_id == spec(seed=5).run_id != before
    assert run.model_copy().run_id == run.run_id == before
    assert run == spec() and hash(run) == hash(spec())
    assert run.model_dump() == spec().model_dump()
