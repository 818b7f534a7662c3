# Every target does its own set-up, in .venv/. `make` alone lists them.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
READY := $(VENV)/ready
LAB_PORT ?= 8888
WORKSPACE ?= workspace
# Where `make lab TORCH=cpu` finds the builds of the same versions without CUDA.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PYTHONS := $(PYTHON) python3 python3.13 python3.12 python3.11

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1


# One thread per process, set before torch is imported: on a shared machine two threads that wait for each other can be
# ten times slower than one, and sums of floats differ with the number of threads. `make lab` leaves the choice to you.
test notebooks reference bench: export OMP_NUM_THREADS := 1
# What is stored in the notebooks, and compared, is the small scale on the drawn data set.
test: export LAB_SCALE := small

## lab: set up, prepare the data, make your copy of the labs in workspace/, open JupyterLab (LAB_PORT=8888)
.PHONY: lab
lab: setup
	@python -c "import socket; socket.socket().bind(('127.0.0.1', $(LAB_PORT)))" 2>/dev/null \
	  || { echo "Port $(LAB_PORT) is in use. Choose another: make lab LAB_PORT=$$(($(LAB_PORT) + 1))"; exit 1; }
	@python -m lab_utils.machine || echo "The labs may not run as they should until this is mended; going on all the same."
	@python -m lab_utils.data prepare
	@python -m lab_utils.workspace --workspace $(WORKSPACE)
	@if [ -n "$$SSH_CONNECTION" ]; then \
	  echo; echo "You are connected over SSH. On your own computer, run this and leave it open:"; \
	  echo "    ssh -N -L $(LAB_PORT):127.0.0.1:$(LAB_PORT) $$(id -un)@$$(echo $$SSH_CONNECTION | cut -d' ' -f3)"; \
	  echo "then open the address with the token that JupyterLab prints below."; echo; fi
	@exec jupyter lab --ServerApp.ip=127.0.0.1 --ServerApp.port=$(LAB_PORT) --ServerApp.port_retries=0 \
	  --ServerApp.root_dir=$(WORKSPACE) $(if $(SSH_CONNECTION)$(CI),--no-browser) \
	  $$(test $$(id -u) -ne 0 || echo --allow-root)

## test: set up and run all tests: unit tests, every notebook, the drills
.PHONY: test
test: setup
	@python -m pytest $(ARGS)

## setup: everything the labs need, in .venv/ (TORCH=cpu takes the smaller builds without CUDA)
.PHONY: setup
setup: $(READY)

# `ready` is written last: where it is missing, an earlier set-up was cut off, and a fresh environment replaces it.
$(READY): requirements.lock pyproject.toml
	@for candidate in $(PYTHONS); do \
	  "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	    && python=$$candidate && break; done; \
	if [ -z "$$python" ]; then \
	  echo "No Python 3.11, 3.12 or 3.13 with venv was found (tried: $(PYTHONS))."; \
	  echo "Install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3.12"; \
	  exit 1; fi; \
	if [ -e $(READY) ]; then rm $(READY); else "$$python" -m venv --clear $(VENV); fi
	@echo "Setting up $(VENV) (about three minutes and 6 GB the first time) ..."
ifeq ($(TORCH),cpu)
	@pip install --quiet --progress-bar off --no-deps --index-url $(TORCH_CPU_INDEX) \
	  $$(sed -nE 's/^((torch|torchvision)==[0-9.]+).*/\1/p' requirements.lock)
	@awk '/^[a-z]/ {keep = !/^(torch|torchvision|triton|nvidia-|cuda-)/} keep' requirements.lock > $(VENV)/without-torch.txt
	@pip install --quiet --require-hashes --no-deps -r $(VENV)/without-torch.txt
else
	@pip install --quiet --require-hashes --no-deps -r requirements.lock
endif
	@pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(READY)

## workspace: make or refresh your copy of the labs in workspace/; what you changed is kept
.PHONY: workspace
workspace: setup
	@python -m lab_utils.workspace --workspace $(WORKSPACE)

## notebooks: run all notebooks again and save them with their outputs, and the README's picture
.PHONY: notebooks
notebooks: setup
	@python tests/run_notebooks.py --save notebooks/*.ipynb

## reference: record this machine's run of lab 1 as a reference run, in data/reference/ (needs a GPU)
.PHONY: reference
reference: setup
	@rm -rf runs/reference
	@LAB_SCALE=full LAB_RUNS=$(CURDIR)/runs/reference python tests/run_notebooks.py notebooks/01_mixed_precision.ipynb
	@LAB_RUNS=$(CURDIR)/runs/reference python -m lab_utils.timing reference lab1

## bench: measure the performance claims that a maintainer has to defend
.PHONY: bench
bench: setup
	@python -m benchmarks

## lint: check style and formatting
.PHONY: lint
lint: setup
	@ruff check . && ruff format --check .

## lock: resolve the exact versions again, with hashes, for every Python and platform (needs uv)
.PHONY: lock
lock:
	uv pip compile pyproject.toml --extra test --extra build --universal --python-version 3.11 --generate-hashes \
	  --no-annotate --custom-compile-command "make lock" --output-file requirements.lock

## help: this list
.PHONY: help
help:
	@sed -nE 's/^## ([a-z]+): (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18
