from pathlib import Path

import pytest

from spheroid_node.cli.demo.chart import draw_chart
from spheroid_node.cli.demo.shape import demo_run


@pytest.mark.parametrize("curve", [{}, {1: 5.0, 2: 3.0, 4: 2.5}])
def test_a_png_is_written(tmp_path: Path, curve: dict[int, float]) -> None:
    draw_chart(tmp_path / "ce.png", demo_run(0), curve, 2.4)
    data = (tmp_path / "ce.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000
