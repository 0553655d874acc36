"""Scalar graphs, and the printers that turn them into source code of each backend's language."""
