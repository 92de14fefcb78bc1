"""Everyday tasks, as short as each library lets them be; compared by :mod:`benchmarks.edit_lines`."""
