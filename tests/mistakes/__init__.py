"""Mistakes to plant in the library, and what plants them: `PYTHONPATH=tests python -m mistakes.run`."""
