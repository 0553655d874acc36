"""The figures of docs/kernels.md can be drawn with the current solver."""

from docs.tools.kernel_figures import draw_steps, draw_storage


def test_figures_are_drawn(tmp_path):
    for name, draw in {"storage": draw_storage, "steps": draw_steps}.items():
        draw(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
