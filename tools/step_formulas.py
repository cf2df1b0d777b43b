"""Records data/step_formulas.json.gz: the formulas behind the memory calculator, for all models
that it offers.

python tools/step_formulas.py
"""

from labutils.memory import formulas
from labutils.teach import calculator


def main() -> None:
    models = calculator.Calculator().kinds.values()
    kinds = [kind for model in models for kind in calculator.every_kind(model)]
    formulas.store(dict.fromkeys(kinds), formulas.STORED)
    print(f"{len(kinds)} kinds of step, {formulas.STORED.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
