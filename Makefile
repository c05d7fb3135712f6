# make demo    a picture from the embedded model, over HTTP, from nothing
# make test    all tests
# make lint    ruff and mypy
# make clean   remove what these made

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: .venv demo test lint clean

.venv: $(INSTALLED)

# torchvision only serves image and video processors. Its wheel is linked to CUDA: --no-deps keeps it from replacing a
# CPU build of torch, and the second line lets it import beside one. xgrammar wants triton, which only a GPU needs.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into .venv, which takes a minute or two"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps torchvision
	$(BIN)/python -m polymux.testing.torchvision_cpu install
	$(BIN)/pip install -q -c constraints.txt --no-deps xgrammar apache-tvm-ffi
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py out/demo.png

# A worker takes a file as a whole, so that its servers and models start once, in the order of the files: long ones first.
test: $(INSTALLED)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build out *.egg-info .pytest_cache .ruff_cache .mypy_cache
