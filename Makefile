# Each target does the set-up that it needs, in .venv/. `make` alone lists them.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PY := .venv/bin/python
READY := .venv/ready
LAB_PORT ?= 8888
WORKSPACE ?= workspace
# BEGIN: not in a release
STUDENT ?= student
# Processes that share the tests; 0 runs them in pytest's own, for a debugger.
WORKERS ?= 3
TEAMS ?= hosting/teams.csv
# END: not in a release
# What a Python has to be, and the one behind it where it belongs to an environment.
SUITS := import ensurepip, sys, venv; assert (3, 11) <= sys.version_info[:2] <= (3, 13); print(sys._base_executable)

# For the terminals of JupyterLab; the recipes name $(PY), since not every make looks here for a program.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export TORCH
# macOS ends a process that was forked after its parent used the system's own libraries; forked ranks use none of them.
export OBJC_DISABLE_INITIALIZE_FORK_SAFETY := YES

# BEGIN: not in a release
# One thread per process, set before torch is imported: on a shared machine two threads that wait for each other can be
# ten times slower than one, and sums of floats differ with the number of threads. `make lab` leaves the choice to you.
test test-system drills fuzz checks notebooks reference bench: export OMP_NUM_THREADS := 1
# Each of the processes that share the tests would compile all of them anew, where a shell forbids to keep that.
test test-system drills fuzz checks: export PYTHONDONTWRITEBYTECODE :=
# What is stored in the notebooks, and compared, is the small scale on the drawn data set.
test test-system drills fuzz: export LAB_SCALE := small
# END: not in a release

## lab: set up, prepare the data, make your copy of the labs in workspace/, open JupyterLab (LAB_PORT=8888)
.PHONY: lab
lab: setup
	@$(PY) -m course.running $(LAB_PORT)
	@$(PY) -m course.prepare --workspace "$(WORKSPACE)"
	@if [ -n "$$SSH_CONNECTION" ]; then \
	  echo; echo "You are connected over SSH. On your own computer, run this and leave it open:"; \
	  echo "    ssh -N -L $(LAB_PORT):127.0.0.1:$(LAB_PORT) $$(id -un)@$$(echo $$SSH_CONNECTION | cut -d' ' -f3)"; \
	  echo "then open the address with the token that JupyterLab prints below."; echo; fi
	@exec $(PY) -m jupyterlab --ServerApp.ip=127.0.0.1 --ServerApp.port=$(LAB_PORT) --ServerApp.port_retries=0 \
	  --ServerApp.root_dir="$(WORKSPACE)" --LabApp.default_url=/lab/tree/START.md --Application.log_level=WARN $(if $(SSH_CONNECTION)$(CI),--no-browser) \
	  $$(test $$(id -u) -ne 0 || echo --allow-root)

# BEGIN: not in a release
## test: set up and run the tests: unit tests, every notebook, two nodes on this machine, the drills
.PHONY: test
test: setup
	@$(PY) -m pytest -n $(WORKERS) $(ARGS)

## test-system: what `make test` leaves out: what needs root and packages (two hosts, Slurm, Chromium) or takes long
.PHONY: test-system
test-system: setup
	@$(PY) -m pytest -n $(WORKERS) -m "system and not hosting" -rs tests $(ARGS)

## test-all: both
.PHONY: test-all
test-all: test test-system

## host: bring up the teams of TEAMS=hosting/teams.csv in containers of their own (hosting/README.md; ARGS="--address ...")
.PHONY: host
host:
	@$(if $(PYTHON),"$(PYTHON)",python3) -m hosting up $(TEAMS) $(ARGS)

## test-hosting: build the teams' image and drive two teams in containers (needs root, podman, runc and mmdebstrap)
.PHONY: test-hosting
test-hosting: setup
	@$(PY) -m pytest -n 0 -m hosting -rs tests/test_hosting*.py $(ARGS)

## drills: what goes wrong between nodes, and with more interrupts than `make test` has time for
.PHONY: drills
drills: setup
	@LAB_INTERRUPTS=50 $(PY) -m pytest -n $(WORKERS) -m "drill and not hosting" tests $(ARGS)

## fuzz: thousands of hostile archives, reports and notebooks, at most five minutes (SEED=number repeats a run)
.PHONY: fuzz
fuzz: setup
	@seed=$${SEED:-$$(date +%s)}; echo "SEED=$$seed"; LAB_FUZZ=$$seed timeout 300 $(PY) -m pytest -n $(WORKERS) tests/test_fuzz_*.py $(ARGS)

## checks: for each exercise how many wrong answers are refused, each with its hint, and how many right ones accepted
.PHONY: checks
checks: setup
	@$(PY) -m pytest -q -m "not hosting" -p tests.harness.checks_table tests/test_check_lab*.py tests/test_check_tables.py
# END: not in a release

## setup: everything the labs need, in .venv/ (TORCH=cpu takes the smaller builds without CUDA)
.PHONY: setup
setup: $(READY)

# Not there, or made for another folder, or its Python is gone: set up in any case.
ifneq ($(shell cat $(READY) 2>/dev/null && $(PY) -c '' 2>/dev/null && echo runs),$(CURDIR) runs)
$(READY): FORCE
endif
$(READY): requirements.lock pyproject.toml course/jupyterlab.json
	@for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11); do \
	  python=$$("$$candidate" -c '$(SUITS)' 2>/dev/null) && break; done; \
	if [ -z "$$python" ]; then \
	  echo "No Python 3.11, 3.12 or 3.13 with venv was found$(if $(PYTHON), at $(PYTHON))."; \
	  echo "Install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3.12"; \
	  exit 1; fi; \
	"$$python" setup_venv.py
FORCE:

## engines: a framework in an environment of its own (ENGINE=lightning: lab 12; ray: 13; horovod, tensorflow, jax: 14)
.PHONY: engines
engines: setup
	@$(PY) setup_engine.py $(ENGINE)

## slurm: start a Slurm of two nodes on this machine, for lab 13 (Linux; it says which packages it needs)
.PHONY: slurm
slurm: setup
	@$(PY) -m course.pocket_slurm up

## slurm-down: end that Slurm and its jobs
.PHONY: slurm-down
slurm-down: setup
	@$(PY) -m course.pocket_slurm down

## workspace: make or refresh your copy of the labs in workspace/; what you changed is kept
.PHONY: workspace
workspace: setup
	@$(PY) -m course.workspace --workspace "$(WORKSPACE)"

# BEGIN: not in a release
# What a release leaves out: from a line BEGIN to its END, and marked lines. A sentence of the release alone stands in its mark.
RELEASE := -e '/^(<!--|\#) BEGIN: not in a release/,/^(<!--|\#) END: not in a release/d' -e '/<!-- not in a release -->/d' \
  -e 's/^<!-- in a release: (.*) -->$$/\1/'

## student: write the release copy for learners into STUDENT=student/: stubs in place of solutions, no outputs, no tests
.PHONY: student
student: setup
	@test ! -e "$(STUDENT)" || { echo "$(STUDENT) is there already. Choose another: make student STUDENT=folder"; exit 1; }
	@mkdir -p "$(STUDENT)"
	@git ls-files -z ':!tests' ':!benchmarks' ':!website' ':!.ci' ':!conftest.py' ':!notebooks' ':!hosting' ':!.dockerignore' ':!.github' ':!CONTRIBUTING.md' ':!docs/performance.md' | tar --null -T - -cf - | tar -xf - -C "$(STUDENT)"
	@for file in README.md SECURITY.md Makefile data/README.md $$(cd "$(STUDENT)" && echo docs/*.md); do sed -E $(RELEASE) $$file | cat -s >"$(STUDENT)/$$file"; done
	@$(PY) -m course.workspace --workspace "$(STUDENT)/notebooks"

## notebooks: run all notebooks again and save them with their outputs
.PHONY: notebooks
notebooks: setup
	@$(PY) tests/harness/run_notebooks.py --save notebooks/*.ipynb

## picture: take the README's picture of JupyterLab again (needs Chromium)
.PHONY: picture
picture: setup
	@PYTHONPATH=tests $(PY) -m harness.take_picture

## reference: record this machine's run of lab 1 as a reference run, in data/reference/ (needs a GPU; LAB=0, or LAB=4, 5 with two)
.PHONY: reference
reference: LAB ?= 1
reference: setup
	@rm -rf runs/reference
	@LAB_SCALE=full LAB_RUNS=$(CURDIR)/runs/reference $(PY) -m nbconvert --to notebook --execute --output-dir runs/reference \
	  notebooks/0$(LAB)_*.ipynb
	@LAB_RUNS=runs/reference $(PY) -m course.reference lab$(LAB)

## gpu: on a machine with a GPU: the tests that need one, the reference runs of labs 0 and 1, the speed of a training step
.PHONY: gpu
gpu: setup
	@$(PY) -m pytest -c tests/gpu/pytest.ini --confcutdir=tests/gpu tests/gpu --record $(ARGS)
	@$(MAKE) --no-print-directory reference LAB=0
	@$(MAKE) --no-print-directory reference LAB=1
	@$(PY) -m benchmarks.gpu

## bench: measure the performance claims that a maintainer has to defend
.PHONY: bench
bench: setup
	@$(PY) -m benchmarks

## site: the course as a web site, in runs/site/html (no lab is run; ARGS=--solutions: for teachers, in runs/site-solutions/html)
.PHONY: site
site: setup
	@$(PY) setup_engine.py sphinx
	@.engines/sphinx/bin/python -m website $(ARGS)

## lint: check style and formatting
.PHONY: lint
lint: setup
	@$(PY) -m ruff check . && $(PY) -m ruff format --check --exclude "*.ipynb" . \
	  && $(PY) -m ruff format --check --line-length 88 notebooks/*.ipynb

## lock: resolve the exact versions again, with hashes, for every Python and platform (needs the network)
.PHONY: lock
lock:
	uv pip compile pyproject.toml --extra test --extra build --universal --python-version 3.11 --generate-hashes \
	  --no-annotate --custom-compile-command "make lock" --output-file requirements.lock
	uv pip compile hosting/requirements.in --constraint requirements.lock --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --custom-compile-command "make lock" --output-file hosting/requirements.lock \
	  --no-emit-package aiodns --no-emit-package pycares
	for file in engines/*.in; do uv pip compile $$file --constraint requirements.lock --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --custom-compile-command "make lock" --output-file "$${file%.in}.lock" \
	  $$(sed -n 's/^\([a-zA-Z0-9._-]*\)==.*/--no-emit-package \1/p' requirements.lock) || exit 1; done
# END: not in a release

## help: this list
.PHONY: help
help:
	@awk '/^## [a-z-]+: / {line = substr($$0, 4); at = index(line, ": "); \
	  printf "  make %-13s %s\n", substr(line, 1, at - 1), substr(line, at + 2)}' $(MAKEFILE_LIST)
