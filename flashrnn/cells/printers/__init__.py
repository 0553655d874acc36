"""Printers: scalar graphs as source code of each backend's language."""
