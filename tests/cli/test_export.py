import tempfile
from pathlib import Path

import pytest

from spheroid_node.cli.export import check_free
from spheroid_node.errors import OutputUnwritable


def test_a_new_an_empty_and_an_earlier_export_are_fine(tmp_path: Path) -> None:
    check_free(tmp_path / "new")
    check_free(tmp_path)
    for name in ("model.safetensors", "config.json", "README.md"):
        (tmp_path / name).write_text("")
    check_free(tmp_path)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(OutputUnwritable, match="other files, such as thesis"):
        check_free(tmp_path)


@pytest.mark.parametrize("place", ["file", "file/model", "file/far/below"])
def test_a_file_is_no_directory(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputUnwritable, match=f"{place}: Not a directory"):
        check_free(tmp_path / place)


@pytest.mark.parametrize("place", [".", "new", "far/below"])
def test_a_place_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    # Whoever runs the tests may write everywhere.
    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(OutputUnwritable, match="Permission denied"):
        check_free(tmp_path / place)
    assert list(tmp_path.iterdir()) == []
