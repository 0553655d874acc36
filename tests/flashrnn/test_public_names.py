"""What `import flashrnn` gives."""

import pkgutil

import flashrnn


def test_public_names_hide_no_module():
    """Otherwise flashrnn.cells.Cell, after import flashrnn.cells, would look for Cell in what has the module's name."""
    assert not {module.name for module in pkgutil.iter_modules(flashrnn.__path__)} & {*flashrnn.__all__}
    assert flashrnn.cells.Cell is flashrnn.Cell
