"""Records labutils/data/step_formulas.json.gz: the formulas behind the memory calculator, for all
models that it offers. Twenty minutes of processor time.

python tools/step_formulas.py
"""

from concurrent.futures import ProcessPoolExecutor

from labutils.memory import formulas
from labutils.teach import calculator


def main() -> None:
    models = calculator.Calculator().kinds.values()
    kinds = list(dict.fromkeys(kind for each in models for kind in calculator.every_kind(each)))
    with ProcessPoolExecutor() as pool:
        found = dict(zip(kinds, pool.map(formulas.find_fullest, kinds, chunksize=8), strict=True))
    formulas.store(found, formulas.STORED)
    print(f"{len(kinds)} kinds of step, {formulas.STORED.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
