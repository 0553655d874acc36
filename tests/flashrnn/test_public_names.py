"""The names in the package `flashrnn`."""

import pkgutil

import flashrnn


def test_public_names_do_not_hide_modules():
    """After `import flashrnn.cells`, `flashrnn.cells.Cell` must not look for Cell in another object named cells."""
    assert not {module.name for module in pkgutil.iter_modules(flashrnn.__path__)} & {*flashrnn.__all__}
    assert flashrnn.cells.Cell is flashrnn.Cell
