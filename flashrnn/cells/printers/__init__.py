"""Printers, which write scalar graphs as source code in the language of each backend."""
